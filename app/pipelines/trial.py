"""The trial of a pipeline whose requests share calls: a row of a batch must not depend on the rows beside it.

The sample and different inputs run alone, and then in batches in several orders. Each row of each batch must equal the
answer alone. So the trial finds models that drop, repeat or reorder rows, and lists that have the right number of rows
by accident, such as detections with the number of their image.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from app.core.coalescing import Coalescing, CoalescingFault
from app.core.engine import Engine
from app.core.errors import ContractViolation, ModelError, ModelNotReady
from app.core.inference import (
    BYTES,
    FLOAT_DATATYPES,
    Array,
    Deadline,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    new_request_id,
    raw_parts,
)
from app.core.rows import RowsMismatch, cut, joined, key_of, rows_of
from app.pipelines.examples import body_of, declared_requests
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import InputSpec, ParameterSpec

VARIATIONS = 4
"""How many inputs are made from the sample, if there are no examples like it."""
LARGEST_BATCH = 64
"""The most items of a batch of the trial."""

_log = logging.getLogger(__name__)


async def run_trial(engine: Engine, pipeline: Pipeline, coalescing: Coalescing, folder: Path) -> None:
    """Tells ``coalescing`` whether requests to the version that answers may share calls, and logs a refusal.

    ``folder``: what the paths of files are relative to. Raises GatewayError if the model cannot be called now, and the
    errors of files that cannot be read.
    """
    requests = await asyncio.to_thread(_requests_of, pipeline, folder)
    trial = _Trial(engine, pipeline, coalescing)
    try:
        await trial.run(requests)
    except RowsMismatch as exc:
        coalescing.refuse(trial.version, exc.fault)
        text = "requests of pipeline '%s' do not share calls: %s"
        _log.error(text, pipeline.name, exc.fault)
    else:
        coalescing.prove(trial.version)


class _Trial:
    def __init__(self, engine: Engine, pipeline: Pipeline, coalescing: Coalescing) -> None:
        self._engine = engine
        self._timeout_s = pipeline.sample_timeout_s
        self._coalescing = coalescing
        self.version = ""
        """The version that answers."""

    async def run(self, requests: Sequence[InferenceRequest]) -> None:
        """``requests``: the sample, then different ones. Raises RowsMismatch or GatewayError."""
        sample, *others = requests
        first = await self._alone(sample)
        self._compare(first, await self._alone(sample), "differs between two runs of the sample alone")
        alone = [(sample, first)]
        for each in others:
            try:
                alone.append((each, await self._alone(each)))
            except (ModelError, ContractViolation):
                continue  # an input that was made from the sample may be invalid for the model
        if 2 * (rows_of(sample) or 0) > self._coalescing.max_items:
            raise RowsMismatch(CoalescingFault("the sample leaves no room for another request in the same call"))
        if len(alone) == 1:
            text = "the gateway knows no input but the sample: declare different ones as `examples`"
            raise RowsMismatch(CoalescingFault(text))
        if all(_is_equal(first, response) for _, response in alone):
            text = "the model answers every input of the trial alike: declare `examples` with different answers"
            raise RowsMismatch(CoalescingFault(text))
        for order in self._orders(alone):
            await self._in_batch([alone[index] for index in order])

    async def _in_batch(self, members: Sequence[tuple[InferenceRequest, InferenceResponse]]) -> None:
        requests = [request for request, _ in members]
        request = replace(joined(requests), is_probe=True)
        try:
            response = await self._call(request)
        except (ModelError, ContractViolation) as exc:
            text = f"the model fails with {len(requests)} requests in one call: {exc.detail}"
            raise RowsMismatch(CoalescingFault(text)) from exc
        rows = [rows_of(each) or 1 for each in requests]
        for own, (_, alone) in zip(cut(response, request, rows, self._coalescing.outputs), members, strict=True):
            self._compare(alone, own, f"differs between a request alone and the same in a batch of {sum(rows)}")

    async def _alone(self, request: InferenceRequest) -> InferenceResponse:
        response = await self._call(replace(request, request_id=new_request_id()))
        rows = rows_of(request)
        if rows is None:
            raise RowsMismatch(CoalescingFault("the inputs of the sample do not have the same number of rows"))
        return cut(response, request, [rows], self._coalescing.outputs)[0]

    async def _call(self, request: InferenceRequest) -> InferenceResponse:
        response = await self._engine.infer(request, Deadline.after(self._timeout_s))
        if self.version and response.version != self.version:
            raise ModelNotReady(f"The version of model '{request.model}' changed during the trial.")
        self.version = response.version
        return response

    def _orders(self, alone: Sequence[tuple[InferenceRequest, InferenceResponse]]) -> Iterator[list[int]]:
        """The members of each batch: two, the sample last; and as many as may share a call, in a mixed order."""
        yield [1, 0]
        most, random = min(self._coalescing.max_items, LARGEST_BATCH), Random(0)
        order, items = list[int](), 0
        while True:
            index = random.randrange(len(alone))
            items += rows_of(alone[index][0]) or 1
            if items > most:
                break
            order.append(index)
        if len(order) > 2:
            yield order

    def _compare(self, expected: InferenceResponse, found: InferenceResponse, text: str) -> None:
        for name, tensor in expected.outputs.items():
            other = found.outputs.get(name)
            if other is None or not _is_same(tensor, other, self._coalescing.tolerance):
                raise RowsMismatch(CoalescingFault(text, name))


def _is_equal(one: InferenceResponse, other: InferenceResponse) -> bool:
    return all(_is_same(tensor, other.outputs[name], 0.0) for name, tensor in one.outputs.items())


def _is_same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if (one.datatype, one.shape) != (other.datatype, other.shape):
        return False
    if b"".join(raw_parts(one)) == b"".join(raw_parts(other)):
        return True
    if not tolerance or one.datatype not in FLOAT_DATATYPES:
        return False
    first, second = one.array.astype(np.float64), other.array.astype(np.float64)
    return bool(np.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True))


def _requests_of(pipeline: Pipeline, folder: Path) -> list[InferenceRequest]:
    """The sample, and different requests that may share a call with it: the examples, or made from the sample.

    Raises the errors of :func:`app.pipelines.examples.body_of`, and GatewayError for an invalid request.
    """
    declared = declared_requests(pipeline.spec).values()
    sample, *examples = [pipeline.request_of_json(body_of(pipeline, values, folder)) for values in declared]
    key = key_of(sample)
    others = [each for each in examples if key_of(each) == key] or [
        _varied(sample, pipeline, turn) for turn in range(1, VARIATIONS + 1)
    ]
    different = {_content_of(each): each for each in (sample, *others) if rows_of(each) == rows_of(sample)}
    return [replace(each, is_probe=True) for each in different.values()]


def _content_of(request: InferenceRequest) -> bytes:
    return b"".join(part for tensor in request.inputs for part in raw_parts(tensor))


def _varied(sample: InferenceRequest, pipeline: Pipeline, turn: int) -> InferenceRequest:
    """A request like the sample with other values, within the bounds that the pipeline declares."""
    specs: dict[str, InputSpec | ParameterSpec] = {each.tensor.name: each.spec for each in pipeline.inputs}
    specs |= {each.tensor.name: each.spec for each in pipeline.parameters if each.tensor is not None}
    inputs = [
        replace(each, array=_varied_array(each, specs[each.name], turn)) if each.name in specs else each
        for each in sample.inputs
    ]
    return replace(sample, inputs=tuple(inputs), request_id=new_request_id())


def _varied_array(tensor: Tensor, spec: InputSpec | ParameterSpec, turn: int) -> Array:
    """Other values of the same kind: the same in another order where that differs, otherwise other ones."""
    array = tensor.array
    is_text = isinstance(spec, InputSpec) and spec.kind == "text" and tensor.datatype == BYTES
    if isinstance(spec, InputSpec) and spec.kind != "number" and not is_text:
        return array
    if spec.enum:
        values = [each.encode() if isinstance(each, str) else each for each in spec.enum]
        return _filled(array, values[turn % len(values)])
    if tensor.datatype == BYTES:
        texts = [_varied_text(each.decode(errors="replace"), turn).encode() for each in array.flat]
        varied = np.empty(len(texts), np.object_)
        varied[:] = texts
        return varied.reshape(array.shape)
    if tensor.datatype == "BOOL":
        return ~array
    mixed = np.roll(array.reshape(-1)[::-1], turn).reshape(array.shape)
    return mixed if not np.array_equal(mixed, array) else _filled(array, _other_number(array, spec, turn))


def _filled(array: Array, value: Any) -> Array:
    varied = np.empty(array.shape, array.dtype)
    varied[...] = value
    return varied


def _varied_text(text: str, turn: int) -> str:
    mixed = text[turn:] + text[:turn] if len(text) > turn else text[::-1]
    return mixed if mixed != text else f"{text} {'a' * turn}"


def _other_number(array: Array, spec: InputSpec | ParameterSpec, turn: int) -> Any:
    """The first number, moved within its bounds."""
    value, info = array.flat[0].item(), np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
    low, high = (-math.inf, math.inf) if info is None else (int(info.min), int(info.max))
    low = low if spec.minimum is None else max(low, spec.minimum)
    high = high if spec.maximum is None else min(high, spec.maximum)
    moved = [value + turn, value - turn]
    if info is None:
        moved += [(value + high) / 2, (value + low) / 2]
    return next((each for each in moved if low <= each <= high and math.isfinite(each)), value)
