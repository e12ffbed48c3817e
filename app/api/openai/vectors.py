"""Collects the vectors of texts from batches of responses, and renders them as numbers or base64."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from msgspec.structs import replace

from app.domain.errors import ContractViolation, GatewayError
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.json_text import json_of
from app.domain.tensor import Array
from app.pipelines.collector import Collector, Result
from app.pipelines.openai.form import EmbeddingsForm
from app.pipelines.pipeline import Pipeline

_VECTORS_AT_ONCE = 64
"""Number of vectors that are rendered in one step of the event loop."""


class BatchAnswer:
    """Reads each item of a batch like an answer of the pipeline. Implements :class:`app.pipelines.run.Answer`."""

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

    def join(self, response: InferenceResponse) -> None:
        """Raises ContractViolation."""
        for index in range(self._items):
            collector = Collector(self._pipeline, self._request)
            collector.join(self._item(response, index))
            self._add(collector.result())
        tokens = response.outputs.get(self._form.prompt_tokens or "")
        if tokens is not None:
            self.tokens = int(tokens.array.sum())

    def result(self, error: GatewayError | None = None) -> Result:
        """Raises the errors of :meth:`Collector.result`. An early exit of the batch makes every vector empty."""
        if error is not None:
            result = Collector(self._pipeline, self._request).result(error)
            for _ in range(self._items):
                self._add(result)
        return Result({}, self._early_exit)

    def _add(self, result: Result) -> None:
        self.vectors.append(np.asarray(result.values[self._form.embedding], np.float32))
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
    """The vectors of all texts, in order, and the number of tokens."""

    def __init__(self, answers: Sequence[BatchAnswer]) -> None:
        self._arrays = [array for answer in answers for array in answer.vectors]
        counts = [answer.tokens for answer in answers if answer.tokens is not None]
        self._usage = {"usage": {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}} if counts else {}

    async def rendered(self, model: str, *, is_base64: bool) -> list[bytes]:
        """Yields the JSON text of the answer in parts; the event loop can do other work after each part."""
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
