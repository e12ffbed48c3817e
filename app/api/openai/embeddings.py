"""``/v1/embeddings``: one vector for each text, as numbers or as base64.

Collects the vectors of texts from batches of responses, and renders them as numbers or base64.
"""

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
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
from app.api.openai.members import NEUTRAL_OF_EMBEDDINGS, Members, body_of_fields, renamed, required, take
from app.api.openai.requests import form_of, read_named_request
from app.api.responses import JSON, send_parts
from app.core.answer import Ending, Tokens
from app.core.errors import ContractViolation, FieldProblem, GatewayError, InvalidInput
from app.core.inference import Array, InferenceRequest, InferenceResponse, Tensor, bytes_array, new_request_id
from app.core.json import json_of
from app.pipelines.body import refused
from app.pipelines.openai.mapping import EmbeddingsForm, OpenAIMapping
from app.pipelines.parameters import MAX_TOKENS, TokenId, TokenIds
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
        self._items = 1 if form.tensor is None else request.inputs[0].shape[0]
        self._answers = [WholeAnswer(pipeline, request) for _ in range(self._items)]
        self.vectors: list[Array] = []

    @property
    def tokens(self) -> Tokens | None:
        counts = [answer.tokens for answer in self._answers if answer.tokens is not None]
        return sum(counts, Tokens()) if counts else None

    def add(self, response: InferenceResponse) -> None:
        """Raises ContractViolation."""
        for index, answer in enumerate(self._answers):
            answer.add(self._item(response, index))

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`WholeAnswer.finish`. An early exit of the batch makes every vector empty."""
        with openai_names({"input": self._form.input, **self._form.field_by_parameter}):
            endings = [answer.finish(error) for answer in self._answers]
        self.vectors = [self._vector_of(ending) for ending in endings]
        return Ending(next((ending.early_exit for ending in endings if ending.early_exit), None))

    def _vector_of(self, ending: Ending) -> Array:
        """Raises ContractViolation."""
        value = ending.outputs[0][self._form.embedding]
        if value is None and ending.early_exit is not None:
            value = []
        name = self._form.embedding
        try:
            vector: Array = np.asarray(value, np.float32)
        except (TypeError, ValueError) as exc:
            raise _not_a_vector(name) from exc
        if vector.ndim != 1:
            raise _not_a_vector(name)
        return vector

    def _item(self, response: InferenceResponse, index: int) -> InferenceResponse:
        """Raises ContractViolation."""
        if self._form.tensor is None:
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


def _not_a_vector(output: str) -> ContractViolation:
    return ContractViolation(f"Output '{output}' is not a list of numbers.", tensor=output)


class Vectors:
    """The vectors of all texts, in order, and the number of tokens."""

    def __init__(self, answers: Sequence[BatchAnswer]) -> None:
        self._arrays = [array for answer in answers for array in answer.vectors]
        counts = [answer.tokens.prompt for answer in answers if answer.tokens and answer.tokens.prompt is not None]
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
_TEXTS_AT_ONCE = 32
"""For a model without batches: one request for each text."""
MAX_TOTAL_TOKENS = 300_000
"""OpenAI's limit of the token ids of a request."""
_Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
_TextsOrTokens = Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS)]


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
        named = await read_named_request(exchange, self.inference, self.limits, _form_of, "embeddings")
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
        at_once = _BATCHES_AT_ONCE if request.form.tensor is not None else _TEXTS_AT_ONCE

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
                for _ in range(min(at_once, len(batches)) - 1):
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
    items = _take_items(members, form)
    encoding = take(members, "encoding_format", Literal["float", "base64"], "float")
    if "dimensions" not in form.field_by_parameter and take(members, "dimensions", int, form.length) != form.length:
        raise refused([FieldProblem("dimensions", "is not the length of this model's vectors, which is fixed")])
    body = body_of_fields(
        {form.input: msgspec.json.encode(items[0])}, members, form.field_by_parameter, NEUTRAL_OF_EMBEDDINGS
    )
    try:
        requests = _requests_of(pipeline, form, pipeline.reader.from_json(body), items)
    except InvalidInput as exc:
        given = {form.field_by_parameter[name]: name for name in members if name in form.field_by_parameter}
        raise renamed(exc, {**given, form.input: "input"}) from exc
    return EmbeddingsRequest(pipeline, form, requests, encoding == "base64")


def _take_items(members: Members, form: EmbeddingsForm) -> Sequence[Any]:
    """Returns the texts, or the token ids of each text. Raises InvalidInput or InvalidJson."""
    type_, most = (_TextsOrTokens, MAX_TOTAL_TOKENS) if form.takes_tokens else (_Texts, MAX_INPUTS)
    given: str | list[Any] | None = take(members, "input", str | type_, None, max_elements=most)
    if given is None:
        raise required("input")
    if isinstance(given, str):
        return [given]
    ids = sum(isinstance(each, int) for each in given)
    if ids == len(given):
        return [given]
    if ids:
        raise refused([FieldProblem("input", "has token ids beside texts or lists")])
    if len(given) > MAX_INPUTS:
        raise refused([FieldProblem("input", f"has more than {MAX_INPUTS} elements")])
    return given


def _requests_of(
    pipeline: Pipeline, form: EmbeddingsForm, values: Mapping[str, Any], items: Sequence[Any]
) -> Sequence[InferenceRequest]:
    """``values``: of the request for the first item. Raises InvalidInput or InvalidRequest."""
    if form.tensor is None:
        return [pipeline.request_of({**values, form.input: item}) for item in items]
    first, size = pipeline.request_of(values), pipeline.config.max_batch_size
    return [_batch(first, form.tensor, items[start : start + size]) for start in range(0, len(items), size)]


def _batch(first: InferenceRequest, tensor: str, texts: Sequence[str]) -> InferenceRequest:
    """``first``: a request with one text. The result differs only in the texts, which are in ``tensor``."""
    inputs = tuple(_filled(each, texts if each.name == tensor else None, len(texts)) for each in first.inputs)
    return replace(first, inputs=inputs, request_id=new_request_id())


def _filled(tensor: Tensor, texts: Sequence[str] | None, items: int) -> Tensor:
    """Returns the tensor for a batch: with the texts, or with the same value for each item."""
    if texts is None:
        return tensor if items == 1 else replace(tensor, array=np.repeat(tensor.array, items, axis=0))
    shape = tensor.shape if items == 1 else (items, *tensor.shape[1:])
    return replace(tensor, array=bytes_array([text.encode() for text in texts], shape))
