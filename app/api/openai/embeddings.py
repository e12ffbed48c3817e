"""``/v1/embeddings``: one vector for each text, as numbers or as base64.

Collects the vectors of texts from batches of responses, and renders them as numbers or base64.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from msgspec.structs import replace

from app.api.call import Inference
from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.endpoint import Found
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.openai.members import NEUTRAL_OF_EMBEDDINGS, Members, body_of_fields, renamed, required, take
from app.api.openai.openai_errors import openai_names
from app.api.openai.requests import form_of, read_named_request
from app.api.responses import JSON, send_parts
from app.codecs.kinds import declared_shape
from app.core.answer import Answer, Ending, Tokens
from app.core.batch import Batch, BatchPart, check_rows
from app.core.errors import ContractViolation, FieldProblem, GatewayError, InvalidInput
from app.core.inference import Array, InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.core.json import json_of
from app.pipelines.body import refused
from app.pipelines.openai_mapping import EmbeddingsForm, OpenAIMapping
from app.pipelines.parameters import MAX_TOKENS, TokenId, TokenIds
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import WholeAnswer

_VECTORS_AT_ONCE = 64
"""Number of vectors that are rendered in one step of the event loop."""


class EmbeddingsBatch(Batch):
    """The vectors of all texts, in order."""

    def __init__(self, pipeline: Pipeline, form: EmbeddingsForm, requests: Sequence[InferenceRequest]) -> None:
        """``requests``: one with all texts, or one for each text of a model without batches."""
        if form.tensor is None:
            super().__init__(requests[0], 1, len(requests))
        else:
            super().__init__(requests[0], pipeline.call_items)
        self.pipeline = pipeline
        self.form = form
        self.vectors: dict[int, Array] = {}
        """By the number of the text."""
        self._early_exit: str | None = None
        self._requests = requests

    def request_of(self, items: range) -> InferenceRequest:
        return super().request_of(items) if self.form.tensor is not None else self._requests[items.start]

    def answer_of(self, part: BatchPart) -> Answer:
        return _PartAnswer(self.pipeline, self.form, part)

    def put(self, items: range, _answer: Answer, ending: Ending) -> None:
        self.vectors |= zip(items, (values[self.form.embedding] for values in ending.outputs), strict=True)
        self._early_exit = self._early_exit or ending.early_exit

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the error."""
        super().finish(error)
        return Ending(self._early_exit)


class _PartAnswer(Answer):
    """Reads each item of a part like an answer of the pipeline."""

    def __init__(self, pipeline: Pipeline, form: EmbeddingsForm, part: BatchPart) -> None:
        self._pipeline = pipeline
        self._form = form
        self._items = part.items
        self._answers = [WholeAnswer(pipeline, part.request) for _ in part.items]

    @property
    def tokens(self) -> Tokens | None:
        counts = [answer.tokens for answer in self._answers if answer.tokens is not None]
        return sum(counts, Tokens()) if counts else None

    def add(self, response: InferenceResponse) -> None:
        """Raises ContractViolation."""
        if self._form.tensor is None:
            self._answers[0].add(response)
            return
        outputs = [replace(each, array=self._rows(each)) for each in response.outputs.values()]
        for index, answer in enumerate(self._answers):
            own = {each.name: replace(each, array=each.array[index : index + 1]) for each in outputs}
            answer.add(replace(response, outputs=own))

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Returns the vector of each item. An early exit makes it empty.

        Raises the errors of :meth:`WholeAnswer.finish`.
        """
        with openai_names({"input": self._form.input, **self._form.field_by_parameter}):
            endings = [answer.finish(error) for answer in self._answers]
        early_exit = next((ending.early_exit for ending in endings if ending.early_exit), None)
        return Ending(early_exit, [{self._form.embedding: self._vector_of(ending)} for ending in endings])

    def _vector_of(self, ending: Ending) -> Array:
        """Raises ContractViolation."""
        name = self._form.embedding
        value = ending.outputs[0][name]
        if value is None and ending.early_exit is not None:
            value = []
        try:
            vector: Array = np.asarray(value, np.float32)
        except (TypeError, ValueError) as exc:
            raise _not_a_vector(name) from exc
        if vector.ndim != 1:
            raise _not_a_vector(name)
        return vector

    def _rows(self, tensor: Tensor) -> Array:
        """The array with one row for each item; an empty one is unchanged. Raises ContractViolation."""
        array, items = tensor.array, self._items
        if array.size and array.shape[:1] != (len(items),):
            spec = self._pipeline.config.output(tensor.name)
            shape = None if spec is None else declared_shape(array.shape, (len(items), *spec.dims))
            array = array if shape is None else array.reshape(shape)
            check_rows(tensor.name, array.shape[0] if array.ndim else 0, items)
        return array


def _not_a_vector(output: str) -> ContractViolation:
    return ContractViolation(f"Output '{output}' is not a list of numbers.", tensor=output)


class OpenAIEmbedding(TypedDict):
    object: Literal["embedding"]
    index: Annotated[int, Meta(ge=0)]
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64 of little-endian 32-bit floats")]


class OpenAIInputUsage(TypedDict):
    prompt_tokens: Annotated[int, Meta(ge=0)]
    total_tokens: Annotated[int, Meta(ge=0)]


class OpenAIEmbeddings(TypedDict):
    object: Literal["list"]
    model: str
    usage: NotRequired[OpenAIInputUsage]
    data: list[OpenAIEmbedding]


async def _rendered(batch: EmbeddingsBatch, model: str, *, is_base64: bool) -> list[bytes]:
    """Returns the JSON text of the answer in parts; the event loop can do other work after each part."""
    count = None if batch.tokens is None else batch.tokens.prompt
    usage = {} if count is None else {"usage": {"prompt_tokens": count, "total_tokens": count}}
    parts = [orjson.dumps({"object": "list", "model": model, **usage})[:-1] + b',"data":[']
    vectors = sorted(batch.vectors.items())
    for start in range(0, len(vectors), _VECTORS_AT_ONCE):
        some = vectors[start : start + _VECTORS_AT_ONCE]
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
MAX_TOTAL_TOKENS = 300_000
"""OpenAI's limit of the token ids of a request."""
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
_TextsOrTokens = Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """The texts: in one request, or each in its own for a model without batches."""

    pipeline: Pipeline
    form: EmbeddingsForm
    requests: Sequence[InferenceRequest]
    is_base64: bool


@dataclass(frozen=True, slots=True)
class EmbeddingsRoute:
    inference: Inference
    limits: Limits

    async def post(self, exchange: Exchange, _found: Found) -> None:
        request = await self._read(exchange)
        with CancelledOnDisconnect(exchange):
            batch = await self._answered(exchange, request)
        name = request.pipeline.name
        await send_parts(exchange, await _rendered(batch, name, is_base64=request.is_base64), [JSON])

    async def _read(self, exchange: Exchange) -> EmbeddingsRequest:
        """The result keeps no reference to the body."""
        named = await read_named_request(exchange, self.inference, self.limits, _form_of, "embeddings")
        form = form_of(named.pipeline, _form_of, "embeddings")
        deadline = deadline_of(exchange, named.pipeline.timeout_s)
        request = await named.read(lambda: embeddings_request(named.pipeline, form, named.members), exchange, deadline)
        exchange.forget_body()
        return request

    async def _answered(self, exchange: Exchange, request: EmbeddingsRequest) -> EmbeddingsBatch:
        inference, pipeline = self.inference, request.pipeline
        batch = EmbeddingsBatch(pipeline, request.form, request.requests)
        call = inference.call(exchange, pipeline, deadline_of(exchange, pipeline.timeout_s))
        call.requests, call.answer = request.requests, batch
        await inference.answer(call)
        return batch


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
    type_, most = (_TextsOrTokens, MAX_TOTAL_TOKENS) if form.takes_tokens else (Texts, MAX_INPUTS)
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
    return [_with_all(pipeline.request_of(values), form.tensor, items)]


def _with_all(first: InferenceRequest, tensor: str, texts: Sequence[str]) -> InferenceRequest:
    """``first``: a request with one text. The result has all texts, in ``tensor``."""
    inputs = tuple(_filled(each, texts if each.name == tensor else None, len(texts)) for each in first.inputs)
    return replace(first, inputs=inputs)


def _filled(tensor: Tensor, texts: Sequence[str] | None, items: int) -> Tensor:
    """Returns the tensor for all items: with the texts, or with the same value for each item."""
    if texts is None:
        return tensor if items == 1 else replace(tensor, array=np.repeat(tensor.array, items, axis=0))
    shape = tensor.shape if items == 1 else (items, *tensor.shape[1:])
    return replace(tensor, array=bytes_array([text.encode() for text in texts], shape))
