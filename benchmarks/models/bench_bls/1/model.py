"""The same as ``bench_shared``, as a script that awaits both heads together."""

import asyncio

from model_kit.bls import answer_together, call
from model_kit.serving import input_of


class TritonPythonModel:
    async def execute(self, requests):
        return await answer_together(requests, self._answer)

    async def _answer(self, request):
        (features,) = await call(request, "bench_features", {"FLOATS": input_of(request, "FLOATS")}, ["FEATURES"], ())
        heads = (call(request, f"bench_head_{head}", {"FEATURES": features}, ["ANSWER"], ()) for head in "bc")
        (b_answer,), (c_answer,) = await asyncio.gather(*heads)
        return {"B_ANSWER": b_answer, "C_ANSWER": c_answer}
