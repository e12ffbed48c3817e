"""``/v1/embeddings``: one vector for each text, as numbers or as base64."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from starlette.types import Send

from app.admission.slot import Slot
from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.inference import Call, Inference
from app.api.limits import Limits
from app.api.openai.asked import asked_of, form_of
from app.api.openai.members import Members, body_of_fields, renamed, required, take
from app.api.openai.neutral import NEUTRAL_OF_EMBEDDINGS
from app.api.openai.vectors import BatchAnswer, Vectors
from app.api.responses import JSON, send_parts
from app.domain.errors import FieldProblem, InvalidInput
from app.domain.inference import InferenceRequest
from app.domain.request_id import new_request_id
from app.domain.tensor import Tensor, bytes_array
from app.pipelines.body import refused
from app.pipelines.openai.form import EmbeddingsForm, OpenAIForm
from app.pipelines.pipeline import Pipeline

MAX_INPUTS = 2048
"""OpenAI's limit."""
_BATCHES_AT_ONCE = 4
_Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """The texts, as one request to the model for each batch."""

    pipeline: Pipeline
    form: EmbeddingsForm
    batches: Sequence[InferenceRequest]
    is_base64: bool


class EmbeddingsRoute:
    def __init__(self, inference: Inference, limits: Limits) -> None:
        self._inference = inference
        self._limits = limits

    async def post(self, exchange: Exchange, _found: Mapping[str, str], _send: Send) -> None:
        request = await self._read(exchange)
        name = request.pipeline.name
        with CancelledOnDisconnect(exchange):
            vectors = await self._vectors(exchange, request)
        await send_parts(exchange, await vectors.rendered(name, is_base64=request.is_base64), [JSON])

    async def _read(self, exchange: Exchange) -> EmbeddingsRequest:
        """The result keeps no reference to the body."""
        asked = await asked_of(exchange, self._inference, self._limits, _form_of)
        form = form_of(asked.pipeline, _form_of, "embeddings")
        request = await asked.read(lambda: embeddings_request(asked.pipeline, form, asked.members))
        exchange.forget_body()
        return request

    async def _vectors(self, exchange: Exchange, request: EmbeddingsRequest) -> Vectors:
        """Runs only a few batches at a time, so that a long list of one caller does not fill Triton's queue.

        The first batch waits for a slot. The others run only if slots are free and no other request waits.
        """
        pipeline, batches = request.pipeline, request.batches
        deadline = deadline_of(exchange, pipeline.timeout_s)
        answers = [BatchAnswer(pipeline, request.form, batch) for batch in batches]
        calls = [Call(pipeline, batch, deadline, exchange.record, exchange.caller) for batch in batches]
        waiting = iter(zip(calls, answers, strict=True))

        async def answer_some(slot: Slot) -> None:
            for call, answer in waiting:
                await self._inference.answer_in(slot, call, answer)
                slot.answered()

        def start(slot: Slot) -> None:
            group.create_task(answer_some(slot)).add_done_callback(partial(_leave, slot))

        first = await self._inference.take_slot(calls[0])
        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                start(first)
                for _ in range(min(_BATCHES_AT_ONCE, len(batches)) - 1):
                    if (slot := self._inference.take_free_slot(calls[0])) is not None:
                        start(slot)
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from None
        finally:
            exchange.record.triton_s = time.perf_counter() - started  # the batches overlap
        return Vectors(answers)


def _leave(slot: Slot, task: asyncio.Task[None]) -> None:
    """The duration of each batch was measured already."""
    failure = None if task.cancelled() else task.exception()
    slot.leave(failure or asyncio.CancelledError())


def _form_of(openai: OpenAIForm) -> EmbeddingsForm | None:
    return openai.embeddings


def embeddings_request(pipeline: Pipeline, form: EmbeddingsForm, members: Members) -> EmbeddingsRequest:
    """Raises InvalidInput, InvalidRequest or InvalidJson."""
    texts: str | list[str] | None = take(members, "input", str | _Texts, None, max_elements=MAX_INPUTS)
    if texts is None:
        raise required("input")
    encoding = take(members, "encoding_format", Literal["float", "base64"], "float")
    if take(members, "dimensions", int, form.length) != form.length:
        raise refused([FieldProblem("dimensions", "is not the length of this model's vectors, which is fixed")])
    texts = [texts] if isinstance(texts, str) else texts
    body = body_of_fields(
        {form.input: msgspec.json.encode(texts[0])}, members, form.field_by_parameter, NEUTRAL_OF_EMBEDDINGS
    )
    try:
        first = pipeline.request_of_json(body)
    except InvalidInput as exc:
        given = {form.field_by_parameter[name]: name for name in members if name in form.field_by_parameter}
        raise renamed(exc, {**given, form.input: "input"}) from exc
    tensor = next(field.tensor.name for field in pipeline.inputs if field.name == form.input)
    return EmbeddingsRequest(pipeline, form, list(_batches(pipeline, first, tensor, texts)), encoding == "base64")


def _batches(
    pipeline: Pipeline, first: InferenceRequest, tensor: str, texts: Sequence[str]
) -> Iterator[InferenceRequest]:
    """``first``: a request with only the first text. The other requests differ only in ``tensor``."""
    size = max(pipeline.config.max_batch_size, 1)
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        inputs = tuple(_filled(each, batch if each.name == tensor else None, len(batch)) for each in first.inputs)
        yield replace(first, inputs=inputs, request_id=new_request_id())


def _filled(tensor: Tensor, texts: Sequence[str] | None, items: int) -> Tensor:
    """Returns the tensor for a batch: with the texts, or with the same value for each item."""
    if texts is None:
        return tensor if items == 1 else replace(tensor, array=np.repeat(tensor.array, items, axis=0))
    shape = tensor.shape if items == 1 else (items, *tensor.shape[1:])
    return replace(tensor, array=bytes_array([text.encode() for text in texts], shape))
