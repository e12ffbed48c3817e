"""``/v1/embeddings``: one vector for each text, as numbers or as base64."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from msgspec.structs import replace

from app.api.bodies import off_loop
from app.api.call import InferenceCall
from app.api.endpoint import Found
from app.api.exchange import JSON, Exchange
from app.api.openai.requests import NEUTRAL_OF_EMBEDDINGS, Door, NamedRequest, openai_names, required, take
from app.codecs.kinds import declared_shape
from app.core.answer import Answer, Batch, BatchPart, Ending, Tokens, check_rows
from app.core.errors import ContractViolation, FieldProblem, GatewayError
from app.core.inference import Array, InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.core.json import json_of
from app.pipelines.body import problem_of_value, refused
from app.pipelines.fields import MAX_TOKENS, Field, TokenId, TokenIds
from app.pipelines.openai_mapping import EmbeddingsForm
from app.pipelines.run import Collector

MAX_INPUTS = 2048
"""OpenAI's limit."""
MAX_TOTAL_TOKENS = 300_000
"""OpenAI's limit of the token ids of a request."""
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
_TextsOrTokens = Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS)]
_VECTORS_AT_ONCE = 64
"""Number of vectors that are rendered in one step of the event loop."""


class EmbeddingsRoute(Door[EmbeddingsForm]):
    part = operation = "embeddings"

    async def post(self, exchange: Exchange, _found: Found) -> None:
        """The event loop can do other work after each part of the answer."""
        call, batch = await self._read(exchange)
        with exchange.cancelled_on_disconnect():
            await self.inference.answer(call)
        count = None if batch.tokens is None else batch.tokens.prompt
        usage = {} if count is None else {"usage": {"prompt_tokens": count, "total_tokens": count}}
        parts = [orjson.dumps({"object": "list", "model": call.target.name, **usage})[:-1] + b',"data":[']
        vectors = sorted(batch.vectors.items())
        for start in range(0, len(vectors), _VECTORS_AT_ONCE):
            items = []
            for index, array in vectors[start : start + _VECTORS_AT_ONCE]:
                is_base64 = batch.encoding == "base64"
                embedding = base64.b64encode(array.astype("<f4").tobytes()).decode() if is_base64 else array
                items.append(json_of({"object": "embedding", "index": index, "embedding": embedding}))
            parts.append((b"," if start else b"") + b",".join(items))
            await asyncio.sleep(0)
        await exchange.send_parts([*parts, b"]}"], [JSON])

    async def _read(self, exchange: Exchange) -> tuple[InferenceCall, "EmbeddingsBatch"]:
        """The result keeps no reference to the body."""
        named = await self.open(exchange)
        call = self.inference.call(exchange, named.pipeline, exchange.deadline(named.pipeline.timeout_s))
        batch = await off_loop(lambda _body: batch_of(named), named.body, exchange, call.deadline)
        call.requests, call.answer = batch.requests, batch
        exchange.body_memory = None
        return call, batch


def batch_of(named: NamedRequest[EmbeddingsForm]) -> "EmbeddingsBatch":
    """Raises InvalidInput, InvalidRequest or InvalidJson."""
    pipeline, form, members = named.pipeline, named.form, named.members
    items = _items_of(members, form)
    encoding = take(members, "encoding_format", Literal["float", "base64"], "float")
    if "dimensions" not in form.field_by_parameter and take(members, "dimensions", int, form.length) != form.length:
        raise refused([FieldProblem("dimensions", "is not the length of this model's vectors, which is fixed")])
    if len(items) > 1:  # the reader gets only the first one
        fields: list[Field] = [*pipeline.inputs, *pipeline.parameters]
        type_: Any = next(each.json_type for each in fields if each.name == form.input)
        try:
            msgspec.convert(items, list[type_])
        except msgspec.ValidationError as exc:
            raise refused([problem_of_value("input", str(exc))]) from exc
    named.name_by_field[form.input] = "input"
    body = named.body_of({form.input: msgspec.json.encode(items[0])}, NEUTRAL_OF_EMBEDDINGS)
    with openai_names(named.name_by_field):
        values = pipeline.reader.from_json(body)
        if form.tensor is None:
            requests = [pipeline.request_of({**values, form.input: item}) for item in items]
        else:  # one request with all texts; its other inputs are repeated
            first = pipeline.request_of(values)
            arrays = {
                each.name: each.array if len(items) == 1 else np.repeat(each.array, len(items), axis=0)
                for each in first.inputs
            }
            texts = [text.encode() for text in items]
            arrays[form.tensor] = bytes_array(texts, arrays[form.tensor].shape)
            inputs = tuple(replace(each, array=arrays[each.name]) for each in first.inputs)
            requests = [replace(first, inputs=inputs)]
    return EmbeddingsBatch(named, requests, encoding)


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


class EmbeddingsBatch(Batch):
    """The vectors of all texts, in order."""

    def __init__(
        self, named: NamedRequest[EmbeddingsForm], requests: Sequence[InferenceRequest], encoding: str
    ) -> None:
        """``requests``: one with all texts, or one for each text of a model without batches.

        ``named`` refers to the body, and is not kept.
        """
        self.pipeline, self.form, self.names = named.pipeline, named.form, named.name_by_field
        self.requests, self.encoding = requests, encoding
        if self.form.tensor is None:
            super().__init__(requests[0], 1, len(requests))
        else:
            super().__init__(requests[0], self.pipeline.call_items)
        self.vectors: dict[int, Array] = {}
        """By the number of the text."""
        self._early_exit: str | None = None

    def request_of(self, items: range) -> InferenceRequest:
        return super().request_of(items) if self.form.tensor is not None else self.requests[items.start]

    def answer_of(self, part: BatchPart) -> Answer:
        return _PartAnswer(self, part)

    def put(self, items: range, _answer: Answer, ending: Ending) -> None:
        self.vectors |= zip(items, (values[self.form.embedding] for values in ending.outputs), strict=True)
        self._early_exit = self._early_exit or ending.early_exit

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the error."""
        super().finish(error)
        return Ending(self._early_exit)


class _PartAnswer(Answer):
    """Reads each item of a part like an answer of the pipeline."""

    def __init__(self, batch: EmbeddingsBatch, part: BatchPart) -> None:
        self._batch = batch
        self._items = part.items
        self._answers = [Collector(batch.pipeline, part.request, is_whole=True) for _ in part.items]

    @property
    def tokens(self) -> Tokens | None:
        counts = [answer.tokens for answer in self._answers if answer.tokens is not None]
        return sum(counts, Tokens()) if counts else None

    def add(self, response: InferenceResponse) -> None:
        """Gives each item its row; an empty array is unchanged. Raises ContractViolation."""
        if self._batch.form.tensor is None:
            self._answers[0].add(response)
            return
        outputs, items = list[Tensor](), self._items
        for each in response.outputs.values():
            array, declared = each.array, self._batch.pipeline.config.outputs
            spec = next((output for output in declared if output.name == each.name), None)
            if array.size and array.shape[:1] != (len(items),):
                shape = None if spec is None else declared_shape(array.shape, (len(items), *spec.dims))
                array = array if shape is None else array.reshape(shape)
                check_rows(each.name, array.shape[0] if array.ndim else 0, items)
            outputs.append(replace(each, array=array))
        for index, answer in enumerate(self._answers):
            own = {each.name: replace(each, array=each.array[index : index + 1]) for each in outputs}
            answer.add(replace(response, outputs=own))

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Returns the vector of each item. An early exit makes it empty.

        Raises ContractViolation, or the errors of :meth:`Collector.finish`.
        """
        with openai_names(self._batch.names):
            endings = [answer.finish(error) for answer in self._answers]
        early_exit = next((ending.early_exit for ending in endings if ending.early_exit), None)
        name, vectors = self._batch.form.embedding, []
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
