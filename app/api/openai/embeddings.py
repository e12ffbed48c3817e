"""``/v1/embeddings``: one vector for each text, as numbers or as base64."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from msgspec.structs import replace

from app.api.call import InferenceCall
from app.api.endpoint import Found
from app.api.exchange import JSON, Exchange
from app.api.openai.members import NEUTRAL_OF_EMBEDDINGS, required, take
from app.api.openai.openai_errors import openai_names
from app.api.openai.requests import Door, NamedRequest
from app.codecs.kinds import declared_shape
from app.core.answer import Answer, Ending, Tokens
from app.core.batch import Batch, BatchPart, check_rows
from app.core.errors import ContractViolation, FieldProblem, GatewayError
from app.core.inference import Array, InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.core.json import json_of
from app.pipelines.body import refused
from app.pipelines.openai_mapping import EmbeddingsForm, OpenAIMapping
from app.pipelines.parameters import MAX_TOKENS, TokenId, TokenIds
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import WholeAnswer

MAX_INPUTS = 2048
"""OpenAI's limit."""
MAX_TOTAL_TOKENS = 300_000
"""OpenAI's limit of the token ids of a request."""
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
_TextsOrTokens = Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS)]
_VECTORS_AT_ONCE = 64
"""Number of vectors that are rendered in one step of the event loop."""


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


class EmbeddingsRoute(Door[EmbeddingsForm]):
    what = operation = "embeddings"
    neutral = NEUTRAL_OF_EMBEDDINGS

    @staticmethod
    def form_of(openai: OpenAIMapping) -> EmbeddingsForm | None:
        return openai.embeddings

    async def post(self, exchange: Exchange, _found: Found) -> None:
        call, batch, is_base64 = await self._read(exchange)
        with exchange.cancelled_on_disconnect():
            await self.inference.answer(call)
        await exchange.send_parts(await _rendered(batch, call.target.name, is_base64=is_base64), [JSON])

    async def _read(self, exchange: Exchange) -> tuple[InferenceCall, "EmbeddingsBatch", bool]:
        """The result keeps no reference to the body."""
        named = await self.open(exchange)
        call = self.inference.call(exchange, named.pipeline, exchange.deadline(named.pipeline.timeout_s))
        batch, is_base64 = await named.read(lambda: batch_of(named), call.deadline)
        call.requests, call.answer = batch.requests, batch
        exchange.forget_body()
        return call, batch, is_base64


def batch_of(named: NamedRequest[EmbeddingsForm]) -> tuple["EmbeddingsBatch", bool]:
    """Returns the batch of the texts, and whether the vectors are wanted as base64.

    Raises InvalidInput, InvalidRequest or InvalidJson.
    """
    pipeline, form, members = named.pipeline, named.form, named.members
    items = _items_of(members, form)
    encoding = take(members, "encoding_format", Literal["float", "base64"], "float")
    if "dimensions" not in form.field_by_parameter and take(members, "dimensions", int, form.length) != form.length:
        raise refused([FieldProblem("dimensions", "is not the length of this model's vectors, which is fixed")])
    named.name_by_field[form.input] = "input"
    body = named.body_of({form.input: msgspec.json.encode(items[0])})
    with openai_names(named.name_by_field):
        values = pipeline.reader.from_json(body)
        if form.tensor is None:
            requests = [pipeline.request_of({**values, form.input: item}) for item in items]
        else:
            requests = [_with_all(pipeline.request_of(values), form.tensor, items)]
    return EmbeddingsBatch(pipeline, form, requests, named.name_by_field), encoding == "base64"


def _items_of(members: dict[str, memoryview], form: EmbeddingsForm) -> Sequence[Any]:
    """Takes the texts out, or the token ids of each text. Raises InvalidInput or InvalidJson."""
    type_, most = (_TextsOrTokens, MAX_TOTAL_TOKENS) if form.takes_tokens else (Texts, MAX_INPUTS)
    given: str | list[Any] | None = take(members, "input", str | type_, None, max_elements=most)
    if given is None:
        raise required("input")
    ids = 0 if isinstance(given, str) else sum(isinstance(each, int) for each in given)
    if isinstance(given, str) or ids == len(given):
        return [given]
    if ids:
        raise refused([FieldProblem("input", "has token ids beside texts or lists")])
    if len(given) > MAX_INPUTS:
        raise refused([FieldProblem("input", f"has more than {MAX_INPUTS} elements")])
    return given


def _with_all(first: InferenceRequest, tensor: str, texts: Sequence[str]) -> InferenceRequest:
    """``first``: a request with one text. The result has all texts, in ``tensor``; other inputs are repeated."""
    items, inputs = len(texts), list[Tensor]()
    for each in first.inputs:
        array = each.array if items == 1 else np.repeat(each.array, items, axis=0)
        if each.name == tensor:
            array = bytes_array([text.encode() for text in texts], array.shape)
        inputs.append(replace(each, array=array))
    return replace(first, inputs=tuple(inputs))


class EmbeddingsBatch(Batch):
    """The vectors of all texts, in order."""

    def __init__(
        self,
        pipeline: Pipeline,
        form: EmbeddingsForm,
        requests: Sequence[InferenceRequest],
        name_by_field: Mapping[str, str],
    ) -> None:
        """``requests``: one with all texts, or one for each text of a model without batches."""
        if form.tensor is None:
            super().__init__(requests[0], 1, len(requests))
        else:
            super().__init__(requests[0], pipeline.call_items)
        self.requests = requests
        self.vectors: dict[int, Array] = {}
        """By the number of the text."""
        self._pipeline = pipeline
        self._form = form
        self._names = name_by_field
        self._early_exit: str | None = None

    def request_of(self, items: range) -> InferenceRequest:
        return super().request_of(items) if self._form.tensor is not None else self.requests[items.start]

    def answer_of(self, part: BatchPart) -> Answer:
        return _PartAnswer(self._pipeline, self._form, part, self._names)

    def put(self, items: range, _answer: Answer, ending: Ending) -> None:
        self.vectors |= zip(items, (values[self._form.embedding] for values in ending.outputs), strict=True)
        self._early_exit = self._early_exit or ending.early_exit

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the error."""
        super().finish(error)
        return Ending(self._early_exit)


class _PartAnswer(Answer):
    """Reads each item of a part like an answer of the pipeline."""

    def __init__(
        self, pipeline: Pipeline, form: EmbeddingsForm, part: BatchPart, name_by_field: Mapping[str, str]
    ) -> None:
        self._pipeline = pipeline
        self._form = form
        self._names = name_by_field
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

        Raises ContractViolation, or the errors of :meth:`WholeAnswer.finish`.
        """
        with openai_names(self._names):
            endings = [answer.finish(error) for answer in self._answers]
        early_exit = next((ending.early_exit for ending in endings if ending.early_exit), None)
        name, vectors = self._form.embedding, []
        for ending in endings:
            value = ending.outputs[0][name]
            try:
                vector = np.asarray([] if value is None and ending.early_exit is not None else value, np.float32)
            except (TypeError, ValueError):
                vector = np.empty((), np.float32)
            if vector.ndim != 1:
                raise ContractViolation(f"Output '{name}' is not a list of numbers.", tensor=name)
            vectors.append({name: vector})
        return Ending(early_exit, vectors)

    def _rows(self, tensor: Tensor) -> Array:
        """The array with one row for each item; an empty one is unchanged. Raises ContractViolation."""
        array, items = tensor.array, self._items
        if array.size and array.shape[:1] != (len(items),):
            spec = self._pipeline.config.output(tensor.name)
            shape = None if spec is None else declared_shape(array.shape, (len(items), *spec.dims))
            array = array if shape is None else array.reshape(shape)
            check_rows(tensor.name, array.shape[0] if array.ndim else 0, items)
        return array


async def _rendered(batch: EmbeddingsBatch, model: str, *, is_base64: bool) -> list[bytes]:
    """Returns the JSON text of the answer in parts; the event loop can do other work after each part."""
    count = None if batch.tokens is None else batch.tokens.prompt
    usage = {} if count is None else {"usage": {"prompt_tokens": count, "total_tokens": count}}
    parts = [orjson.dumps({"object": "list", "model": model, **usage})[:-1] + b',"data":[']
    vectors = sorted(batch.vectors.items())
    for start in range(0, len(vectors), _VECTORS_AT_ONCE):
        items = []
        for index, array in vectors[start : start + _VECTORS_AT_ONCE]:
            embedding = base64.b64encode(array.astype("<f4").tobytes()).decode() if is_base64 else array
            items.append(json_of({"object": "embedding", "index": index, "embedding": embedding}))
        parts.append((b"," if start else b"") + b",".join(items))
        await asyncio.sleep(0)
    return [*parts, b"]}"]
