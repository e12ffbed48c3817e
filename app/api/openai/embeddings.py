"""``/v1/embeddings``: one vector for each text, as numbers or as base64."""

import asyncio
import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from msgspec.structs import replace
from starlette.types import Send

from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.inference import Call, Inference
from app.api.limits import Limits
from app.api.openai.asked import asked_of, form_of
from app.api.openai.members import Members, body_of_fields, renamed, required, take
from app.api.responses import JSON, send_parts
from app.domain.errors import ContractViolation, FieldProblem, GatewayError, InvalidInput
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.json_text import json_of
from app.domain.request_id import new_request_id
from app.domain.tensor import Array, Tensor, bytes_array
from app.pipelines.body import refused
from app.pipelines.collector import Collector, Result
from app.pipelines.openai.form import EmbeddingsForm
from app.pipelines.pipeline import Pipeline

MAX_INPUTS = 2048
"""OpenAI's own limit."""
_AT_ONCE = 64
"""Vectors that are written before the event loop does other work."""
_Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """The texts, as one request to the model for each batch."""

    batches: Sequence[InferenceRequest]
    is_base64: bool


class EmbeddingsRoute:
    def __init__(self, inference: Inference, limits: Limits) -> None:
        self._inference = inference
        self._limits = limits

    async def post(self, exchange: Exchange, _found: Mapping[str, str], _send: Send) -> None:
        asked = await asked_of(exchange, self._inference, self._limits)
        pipeline = asked.pipeline
        form = form_of(pipeline, lambda openai: openai.embeddings, "embeddings")
        request = await asked.read(lambda: embeddings_request(pipeline, form, asked.members))
        exchange.forget_body()
        with self._inference.counted(pipeline.name), CancelledOnDisconnect(exchange):
            vectors = await self._vectors(exchange, pipeline, form, request.batches)
        await send_parts(exchange, await vectors.rendered(pipeline.name, is_base64=request.is_base64), [JSON])

    async def _vectors(
        self, exchange: Exchange, pipeline: Pipeline, form: EmbeddingsForm, batches: Sequence[InferenceRequest]
    ) -> "Vectors":
        """One batch after the other: one caller's long list does not fill Triton's queue."""
        deadline = deadline_of(exchange, pipeline.timeout_s)
        vectors = Vectors()
        for batch in batches:
            answer = BatchAnswer(pipeline, form, batch, vectors)
            await self._inference.answer(Call(pipeline, batch, deadline, exchange.record), answer)
        return vectors


def embeddings_request(pipeline: Pipeline, form: EmbeddingsForm, members: Members) -> EmbeddingsRequest:
    """Raises InvalidInput, InvalidRequest or InvalidJson."""
    texts: str | list[str] | None = take(members, "input", str | _Texts, None, max_elements=MAX_INPUTS)
    if texts is None:
        raise required("input")
    encoding = take(members, "encoding_format", Literal["float", "base64"], "float")
    if take(members, "dimensions", int, form.length) != form.length:
        raise refused([FieldProblem("dimensions", "is not the length of this model's vectors, which is fixed")])
    texts = [texts] if isinstance(texts, str) else texts
    body = body_of_fields({form.input: msgspec.json.encode(texts[0])}, members, form.field_by_parameter)
    try:
        first = pipeline.request_of_json(body)
    except InvalidInput as exc:
        given = {form.field_by_parameter[name]: name for name in members if name in form.field_by_parameter}
        raise renamed(exc, {**given, form.input: "input"}) from exc
    tensor = next(field.tensor.name for field in pipeline.inputs if field.name == form.input)
    return EmbeddingsRequest(list(_batches(pipeline, first, tensor, texts)), encoding == "base64")


def _batches(
    pipeline: Pipeline, first: InferenceRequest, tensor: str, texts: Sequence[str]
) -> Iterator[InferenceRequest]:
    """``first``: a request with the first text alone. The others differ from it in ``tensor`` only."""
    size = max(pipeline.config.max_batch_size, 1)
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        inputs = tuple(_filled(each, batch if each.name == tensor else None, len(batch)) for each in first.inputs)
        yield replace(first, inputs=inputs, request_id=new_request_id())


def _filled(tensor: Tensor, texts: Sequence[str] | None, items: int) -> Tensor:
    """The tensor for that many items: with these texts, or with the same value for each item."""
    if texts is None:
        return tensor if items == 1 else replace(tensor, array=np.repeat(tensor.array, items, axis=0))
    shape = tensor.shape if items == 1 else (items, *tensor.shape[1:])
    return replace(tensor, array=bytes_array([text.encode() for text in texts], shape))


class BatchAnswer:
    """Reads each item of a batch as the pipeline's own answer. Implements :class:`app.pipelines.run.Answer`."""

    has_enough = False

    def __init__(self, pipeline: Pipeline, form: EmbeddingsForm, request: InferenceRequest, vectors: "Vectors") -> None:
        self._pipeline = pipeline
        self._form = form
        self._request = request
        self._vectors = vectors
        self._items = 1 if pipeline.config.max_batch_size == 0 else request.inputs[0].shape[0]
        self._early_exit: str | None = None

    def join(self, response: InferenceResponse) -> None:
        """Raises ContractViolation."""
        for index in range(self._items):
            collector = Collector(self._pipeline, self._request)
            collector.join(self._item(response, index))
            self._add(collector.result())
        self._vectors.count_tokens(response, self._form.prompt_tokens)

    def result(self, error: GatewayError | None = None) -> Result:
        """Raises as :meth:`Collector.result`. An early exit of the whole batch leaves every vector empty."""
        if error is not None:
            result = Collector(self._pipeline, self._request).result(error)
            for _ in range(self._items):
                self._add(result)
        return Result({}, self._early_exit)

    def _add(self, result: Result) -> None:
        self._vectors.add(result.values[self._form.embedding])
        self._early_exit = self._early_exit or result.early_exit

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
    """The vectors of all texts, in order, and how many tokens the texts have."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._tokens: int | None = None

    def add(self, vector: Any) -> None:
        self._arrays.append(np.asarray(vector, np.float32))

    def count_tokens(self, response: InferenceResponse, tensor: str | None) -> None:
        """``tensor``: has the number of tokens of each item; None if the model does not count them."""
        if tensor is not None and tensor in response.outputs:
            self._tokens = (self._tokens or 0) + int(response.outputs[tensor].array.sum())

    async def rendered(self, model: str, *, is_base64: bool) -> list[bytes | bytearray]:
        """The JSON text of the answer in parts. The event loop works on after each part."""
        parts: list[bytes | bytearray] = []
        for start in range(0, len(self._arrays), _AT_ONCE):
            some = enumerate(self._arrays[start : start + _AT_ONCE], start)
            texts = b",".join(json_of(_item(index, array, is_base64=is_base64)) for index, array in some)
            parts.append(b',"data":[' + texts if start == 0 else b"," + texts)
            await asyncio.sleep(0)
        head = orjson.dumps({"object": "list", "model": model, **self._usage()})
        return [head[:-1], *parts, b"]}"]

    def _usage(self) -> dict[str, Any]:
        if self._tokens is None:
            return {}
        return {"usage": {"prompt_tokens": self._tokens, "total_tokens": self._tokens}}


def _item(index: int, array: Array, *, is_base64: bool) -> dict[str, Any]:
    """Base64 is of 32-bit floats, the least significant byte first, as OpenAI's clients read it."""
    embedding = base64.b64encode(array.astype("<f4").tobytes()).decode() if is_base64 else array
    return {"object": "embedding", "index": index, "embedding": embedding}
