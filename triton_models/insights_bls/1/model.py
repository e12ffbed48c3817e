"""TEXT, TOPICS and SENTIMENTS -> the outputs of both heads, which run in parallel."""

import asyncio

from model_kit.bls import answer_together, call
from model_kit.serving import input_of
from model_kit.texts import FAULTS as TEXT_FAULTS

from .insights_steps import HEADS, Head


class TritonPythonModel:
    async def execute(self, requests):
        return await answer_together(requests, self._answer)

    async def _answer(self, request):
        (features,) = await call(request, "text_embed", {"TEXT": input_of(request, "TEXT")}, ["EMBEDDING"], TEXT_FAULTS)
        answers = await asyncio.gather(*(_ask(head, request, features) for head in HEADS))
        return {name: tensor for answer in answers for name, tensor in answer.items()}


async def _ask(head: Head, request, features):
    inputs = {"FEATURES": features, head.labels: input_of(request, head.labels)}
    return dict(zip(head.outputs, await call(request, head.model, inputs, head.outputs, head.faults), strict=True))
