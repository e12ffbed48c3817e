"""Decides which tensors of a call use shared memory, and where they are in the call's region.

A tensor uses shared memory only if Triton certainly no longer uses it after the end of the call. The size of an output
must also be known before the model runs, because Triton fails a call whose output does not fit, after the model ran.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.core.inference import BYTES, DTYPE_BY_DATATYPE, InferenceRequest, Tensor
from app.core.model import ModelConfig, ModelKey, Step, walk


def ends_with_call(model: ModelKey, tensors: frozenset[str], configs: Mapping[ModelKey, ModelConfig]) -> bool:
    """Decides whether Triton no longer uses the tensors of a call after the call has ended.

    This is true for a model that is not an ensemble. An ensemble ends as soon as one step fails, while parallel steps
    continue. So each step that reads an input or writes an output of the call must not run in parallel with another
    step.

    ``tensors``: inputs and outputs of the model. Returns False for a model that is not in ``configs``.
    """
    config = configs.get(model)
    if config is None or not config.is_ensemble:
        return config is not None
    return not config.decoupled and all(
        _runs_alone(config.steps, i) and ends_with_call((step.model, step.version), touched, configs)
        for i, step in enumerate(config.steps)
        # the tensors of the step's model that are mapped to those of the ensemble
        if (touched := frozenset(name for name, tensor in (*step.input_map, *step.output_map) if tensor in tensors))
    )


def _runs_alone(steps: tuple[Step, ...], step: int) -> bool:
    """Whether no other step can run at the same time as this step."""
    indexes = range(len(steps))
    before = walk([step], lambda i: [j for j in indexes if _feeds(steps[j], steps[i])])
    after = walk([step], lambda i: [j for j in indexes if _feeds(steps[i], steps[j])])
    return len({*before, *after}) == len(steps)


def _feeds(first: Step, second: Step) -> bool:
    """Whether the second step reads a tensor that the first step writes."""
    written = {tensor for _, tensor in first.output_map}
    return any(tensor in written for _, tensor in second.input_map)


LARGE_BYTES = 512 * 1024
"""Smaller tensors gain little or nothing; docs/decisions/0012-shared-memory.md has the measurement."""
ALIGNMENT = 64
_NOWHERE: Mapping[int, int] = {}
_MOST_ELEMENTS = 64
"""A BYTES tensor with more elements gains little, because each element is copied separately."""

_Sizes = Sequence[tuple[str, int]]
"""Name and size in bytes of each tensor. The size is 0 for a tensor that is sent over gRPC."""


class ByteRange(NamedTuple):
    """A part of a region, in bytes."""

    offset: int
    size: int


class Layout(NamedTuple):
    """The spans of a call's tensors.

    ``inputs`` has a span for each input of the request, in order. ``outputs`` has all requested outputs, or is empty.
    The span is None for a tensor that is sent over gRPC. ``size`` is the size of the region in bytes; 0: no region.
    """

    inputs: tuple[ByteRange | None, ...]
    outputs: tuple[tuple[str, ByteRange | None], ...]
    size: int


class Layouts:
    """Computes layouts from the known configurations of models."""

    def __init__(self, max_call_bytes: int) -> None:
        """``max_call_bytes``: the large tensors of a call that have more are sent over the wire."""
        self._max_call_bytes = max_call_bytes
        self._configs: dict[ModelKey, ModelConfig] = {}
        self._outputs: dict[ModelKey, _Sizes] = {}
        """Of one item if the model supports batching. The size is 0 if the configuration does not determine it."""
        self._is_suitable: dict[tuple[ModelKey, frozenset[str]], bool] = {}

    def learn(self, config: ModelConfig, version: str) -> None:
        key = (config.name, version)
        if self._configs.get(key) != config:
            self._configs[key] = config
            sizes = []
            for spec in config.outputs:
                dtype = DTYPE_BY_DATATYPE.get(spec.datatype)
                is_unknown = dtype is None or dtype.kind == "O" or min(spec.dims, default=-1) < 0
                sizes.append((spec.name, 0 if dtype is None or is_unknown else math.prod(spec.dims) * dtype.itemsize))
            self._outputs[key] = sizes
            self._is_suitable.clear()

    def layout_of(self, request: InferenceRequest, in_place: Mapping[int, int] = _NOWHERE) -> Layout | None:
        """Returns None if no tensor of the call is large, or if the model cannot use shared memory.

        ``in_place`` has the offset of each input that is already in the region of a body, by its position.
        """
        inputs = [(tensor.name, _raw_size(tensor)) for tensor in request.inputs]
        outputs = self._outputs_of(request)
        large = {name: size for name, size in (*inputs, *outputs) if size >= LARGE_BYTES}
        if not large or sum(large.values()) > self._max_call_bytes:
            return None
        key = (request.model, request.version), frozenset(large)
        if key not in self._is_suitable:
            self._is_suitable[key] = ends_with_call(*key, self._configs)
        if not self._is_suitable[key]:
            return None
        end = 0

        def span_of(size: int) -> ByteRange | None:
            nonlocal end
            if size < LARGE_BYTES:
                return None
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + size
            return ByteRange(start, size)

        spans = tuple(
            ByteRange(in_place[each], size) if each in in_place else span_of(size)
            for each, (_, size) in enumerate(inputs)
        )
        named = tuple((name, span_of(size)) for name, size in outputs)
        return Layout(spans, named if any(span for _, span in named) else (), end)

    def _outputs_of(self, request: InferenceRequest) -> _Sizes:
        key = (request.model, request.version)
        sizes = self._outputs.get(key, ())
        if sizes and request.outputs:
            known = dict(sizes)
            sizes = [(each.name, 0 if each.classification else known.get(each.name, 0)) for each in request.outputs]
        if not sizes or not self._configs[key].max_batch_size:
            return sizes
        shape = request.inputs[0].shape if request.inputs else ()
        return [(name, size * (shape[0] if shape else 0)) for name, size in sizes]


def _raw_size(tensor: Tensor) -> int:
    """Returns the size in Triton's raw form; 0 for a tensor that would not be faster through shared memory."""
    if tensor.datatype != BYTES:
        return tensor.array.nbytes
    if tensor.array.size > _MOST_ELEMENTS:
        return 0
    return sum(4 + len(element) for element in tensor.array.flat)
