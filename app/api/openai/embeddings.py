"""``/v1/embeddings``: one vector for each text, as numbers or as base64.

Collects the vectors of texts from batches of responses, and renders them as numbers or base64.
"""

import asyncio
import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from msgspec.structs import replace
from starlette.types import Send

from app.admission.scheduler import Slot
from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.inference import Inference, InferenceCall
from app.api.limits import Limits
from app.api.openai.errors import openai_names
from app.api.openai.requests import (
    NEUTRAL_OF_EMBEDDINGS,
    Members,
    body_of_fields,
    form_of,
    read_named_request,
    renamed,
    required,
    take,
)
from app.api.responses import JSON, send_parts
from app.core.answer import Ending
from app.core.errors import ContractViolation, FieldProblem, GatewayError, InvalidInput
from app.core.inference import Array, InferenceRequest, InferenceResponse, Tensor, bytes_array, new_request_id
from app.core.json import json_of
from app.pipelines.body import refused
from app.pipelines.openai.mapping import EmbeddingsForm, OpenAIMapping
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import WholeAnswer

_VECTORS_AT_ONCE = 64
"""Number of vectors that are rendered in one step of the event loop."""


class BatchAnswer:
    """Reads each item of a batch like an answer of the pipeline. Implements :class:`app.core.answer.Answer`."""

    has_enough = False

    def __init__(self, pipeline: Pipeline, form: EmbeddingsForm, request: InferenceRequest) -> None:
        self._pipeline = pipeline
        self._form = form
        self._request = request
        self._items = 1 if pipeline.config.max_batch_size == 0 else request.inputs[0].shape[0]
        self._early_exit: str | None = None
        self.vectors: list[Array] = []
        self.tokens: int | None = None
        """None if the model does not count tokens."""

    def add(self, response: InferenceResponse) -> None:
        """Raises ContractViolation."""
        for index in range(self._items):
            answer = WholeAnswer(self._pipeline, self._request)
            answer.add(self._item(response, index))
            self._take(answer.finish())
        tokens = response.outputs.get(self._form.prompt_tokens or "")
        if tokens is not None:
            self.tokens = int(tokens.array.sum())

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`WholeAnswer.finish`. An early exit of the batch makes every vector empty."""
        if error is not None:
            with openai_names({"input": self._form.input, **self._form.field_by_parameter}):
                ending = WholeAnswer(self._pipeline, self._request).finish(error)
            for _ in range(self._items):
                self._take(ending)
        return Ending(self._early_exit)

    def _take(self, ending: Ending) -> None:
        self.vectors.append(np.asarray(ending.outputs[0][self._form.embedding], np.float32))
        self._early_exit = self._early_exit or ending.early_exit

    def _item(self, response: InferenceResponse, index: int) -> InferenceResponse:
        """Raises ContractViolation."""
        if self._pipeline.config.max_batch_size == 0:
            return response
        for name, tensor in response.outputs.items():
            if tensor.array.size and tensor.shape[0] != self._items:
                raise ContractViolation(
                    f"Output '{name}' has {tensor.shape[0]} items; {self._items} were sent.", tensor=name
                )
        outputs = {
            name: replace(tensor, array=tensor.array[index : index + 1]) for name, tensor in response.outputs.items()
        }
        return replace(response, outputs=outputs)


class Vectors:
    """The vectors of all texts, in order, and the number of tokens."""

    def __init__(self, answers: Sequence[BatchAnswer]) -> None:
        self._arrays = [array for answer in answers for array in answer.vectors]
        counts = [answer.tokens for answer in answers if answer.tokens is not None]
        self._usage = {"usage": {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}} if counts else {}

    async def rendered(self, model: str, *, is_base64: bool) -> list[bytes]:
        """Returns the JSON text of the answer in parts; the event loop can do other work after each part."""
        head = orjson.dumps({"object": "list", "model": model, **self._usage})
        parts = [head[:-1] + b',"data":[']
        for start in range(0, len(self._arrays), _VECTORS_AT_ONCE):
            some = enumerate(self._arrays[start : start + _VECTORS_AT_ONCE], start)
            items = b",".join(json_of(_item(index, array, is_base64=is_base64)) for index, array in some)
            parts.append(b"," + items if start else items)
            await asyncio.sleep(0)
        return [*parts, b"]}"]


def _item(index: int, array: Array, *, is_base64: bool) -> dict[str, Any]:
    """Base64 encodes little-endian 32-bit floats, as OpenAI's clients expect."""
    embedding = base64.b64encode(array.astype("<f4").tobytes()).decode() if is_base64 else array
    return {"object": "embedding", "index": index, "embedding": embedding}


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


@dataclass(frozen=True, slots=True)
class EmbeddingsRoute:
    inference: Inference
    limits: Limits

    async def post(self, exchange: Exchange, _found: Mapping[str, str], _send: Send) -> None:
        request = await self._read(exchange)
        name = request.pipeline.name
        with CancelledOnDisconnect(exchange):
            vectors = await self._vectors(exchange, request)
        await send_parts(exchange, await vectors.rendered(name, is_base64=request.is_base64), [JSON])

    async def _read(self, exchange: Exchange) -> EmbeddingsRequest:
        """The result keeps no reference to the body."""
        named = await read_named_request(exchange, self.inference, self.limits, _form_of)
        form = form_of(named.pipeline, _form_of, "embeddings")
        request = await named.read(lambda: embeddings_request(named.pipeline, form, named.members))
        exchange.forget_body()
        return request

    async def _vectors(self, exchange: Exchange, request: EmbeddingsRequest) -> Vectors:
        """Runs only a few batches at a time, so that a long list of one caller does not fill Triton's queue.

        The first batch waits for a slot. The others run only if slots are free and no other request waits.
        """
        pipeline, batches = request.pipeline, request.batches
        target, deadline = self.inference.target_of(pipeline), deadline_of(exchange, pipeline.timeout_s)
        answers = [BatchAnswer(pipeline, request.form, batch) for batch in batches]
        calls = [
            InferenceCall(target, batch, answer, deadline, exchange.record, exchange.caller)
            for batch, answer in zip(batches, answers, strict=True)
        ]
        waiting = iter(calls)

        async def answer_some(slot: Slot) -> None:
            for call in waiting:
                await self.inference.answer_in(slot, call)
                slot.answered()

        def start(slot: Slot) -> None:
            group.create_task(answer_some(slot)).add_done_callback(partial(_leave, slot))

        first = await self.inference.take_slot(calls[0])
        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                start(first)
                for _ in range(min(_BATCHES_AT_ONCE, len(batches)) - 1):
                    if (slot := self.inference.take_free_slot(calls[0])) is not None:
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


def _form_of(openai: OpenAIMapping) -> EmbeddingsForm | None:
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
