"""Joins requests to one batch, cuts the response into those of the requests, and tries whether a model allows that.

The first dimension of every input and output is the batch. A response is cut only if each of its outputs has exactly
the rows of all requests; Triton does not check that.

A row of a batch must not depend on the other rows. In the trial, the sample and different inputs run alone, and
then in batches in several orders. Each row of each batch must equal the answer alone. So the trial finds models that
drop, repeat or reorder rows, and lists that have the right number of rows by accident, such as detections with the
number of their image.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

import numpy as np
from msgspec.structs import replace

from app.core.engine import Engine, PipelineLayer
from app.core.errors import ContractViolation, ModelError, ModelNotReady
from app.core.inference import (
    BYTES,
    FLOAT_DATATYPES,
    Deadline,
    Extension,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    new_request_id,
    raw_parts,
)
from app.core.model import Finding, ModelConfig

LARGEST_BATCH = 64
"""The most items of a batch of the trial."""

_log = logging.getLogger(__name__)


class RowsMismatch(Exception):
    """Why requests must not share calls. ``output``: the output at fault; empty if the fault is not in an output."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(f"output '{output}' {text}" if output else text)
        self.output = output


def rows_of(request: InferenceRequest) -> int | None:
    """Returns the size of the request's batch; None if its inputs do not have the same first dimension."""
    found = {each.array.shape[:1] for each in request.inputs}
    return found.pop()[0] or None if len(found) == 1 and () not in found else None


def bytes_of(request: InferenceRequest) -> int:
    """Returns the size of the request's tensors on the wire, in bytes."""
    return sum(
        sum(4 + len(element) for element in each.array.flat) if each.datatype == BYTES else each.array.nbytes
        for each in request.inputs
    )


def key_of(request: InferenceRequest) -> Hashable:
    """Requests may share a call only if their keys are equal.

    Python compares ``1``, ``1.0`` and ``True`` as equal, but Triton's models do not: parameters are compared with
    their types. The trace is not part of the key, because each call has one of its own.
    """
    return (
        request.model,
        request.version,
        tuple([(each.name, each.datatype, each.array.shape[1:]) for each in request.inputs]),
        tuple([(each.name, each.classification) for each in request.outputs]) if request.outputs else (),
        tuple([(name, type(each), repr(each)) for name, each in sorted(request.parameters.items())])
        if request.parameters
        else (),
        request.takes_traceparent,
    )


def joined(requests: Sequence[InferenceRequest]) -> InferenceRequest:
    """Returns one request with the rows of all, in order. They must have the same :func:`key_of`.

    It has its own id, and the trace of a request that is sampled, if there is one. It is not idempotent: a call that
    failed must not be sent again as a whole, because one of its items may have ended the model's process.
    """
    first = requests[0]
    traces = [each.trace for each in requests if each.trace is not None]
    inputs = tuple(
        [
            replace(tensor, array=np.concatenate([each.inputs[index].array for each in requests]))
            for index, tensor in enumerate(first.inputs)
        ]
    )
    return replace(
        first,
        inputs=inputs,
        request_id=new_request_id(),
        trace=next((trace for trace in traces if trace.is_sampled), traces[0] if traces else None),
        idempotent=False,
        extensions=(),
    )


def check_rows(
    response: InferenceResponse, request: InferenceRequest, rows: int, declared: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks that every output has one row for each of these ``rows`` of the request.

    ``declared``: the dims of the outputs that the model must write if the request names none.

    Raises RowsMismatch if an output is missing, or its first dimension is not ``rows``. So does an output with a free
    dimension that has more or fewer dimensions than declared: its first dimension may be the free one, which has the
    size of the batch by accident.
    """
    outputs = response.outputs
    wanted = {output.name for output in request.outputs} if request.outputs else declared.keys()
    if not outputs.keys() >= wanted:
        raise RowsMismatch("is left out of a response", min(wanted - outputs.keys()))
    for name, tensor in outputs.items():
        shape, dims = tensor.array.shape, declared.get(name, ())
        if shape[:1] != (rows,) or (len(shape) != len(dims) + 1 and -1 in dims):
            text = f"has the shape {list(shape)} for {rows} rows" + (f" of {list(dims)}" if dims else "")
            raise RowsMismatch(text, name)


def cut(
    response: InferenceResponse,
    request: InferenceRequest,
    rows: Sequence[int],
    declared: Mapping[str, tuple[int, ...]],
) -> list[InferenceResponse]:
    """Returns the responses of the requests with these ``rows``, in order.

    ``request``: the joined request. ``declared``: as in :func:`check_rows`, which raises RowsMismatch.
    """
    check_rows(response, request, sum(rows), declared)
    responses, start = [], 0
    for stop in accumulate(rows):
        own = {name: Tensor(name, each.datatype, each.array[start:stop]) for name, each in response.outputs.items()}
        responses.append(InferenceResponse(own, version=response.version))
        start = stop
    return responses


def refusals_of(models: Sequence[ModelConfig]) -> Iterator[str]:
    """Why requests that run through the models cannot share calls."""
    for model in models:
        batch, omitted = model.max_batch_size, "would omit it for every request of a call"
        found = {
            "is decoupled": model.decoupled,
            "has sequence batching": model.sequence is not None,
            f"does not batch (max_batch_size is {batch})": batch < 2,
            **{f"has the input '{each}', which is ragged or a shape tensor": True for each in model.unjoinable_inputs},
            "has a response_cache, which joined requests never hit": model.caches_responses,
            **{f"may omit the output '{each}', and {omitted}": True for each in model.names_in("may_omit")},
        }
        yield from (f"model '{model.name}' {refusal}" for refusal, applies in found.items() if applies)


@dataclass(eq=False)
class Coalescing(PipelineLayer):
    """The shared calls of one compiled pipeline. Compared by identity.

    ``max_items`` and ``max_bytes``: limits of one call. ``steps``: how many models a request runs through.
    ``outputs``: those that the model must write if a request names none, and their dims without the batch.
    """

    pipeline: str
    max_items: int
    max_bytes: int
    outputs: Mapping[str, tuple[int, ...]]
    steps: int = 1
    tolerance: float = 0.0
    needs_trial: bool = True
    fault: Finding | None = None
    """The newest reason why requests do not share calls."""
    proven: set[str] = field(default_factory=set)
    """The versions for which the rows of a shared call may be given to their callers."""
    _refused: set[str] = field(default_factory=set)

    @property
    def is_on(self) -> bool:
        return not self.needs_trial and bool(self.proven)

    def extended(self, request: InferenceRequest) -> InferenceRequest:
        return request.extended(Joinable(self))

    def saw(self, version: str) -> None:
        """Call this for each version that answers. No requests share a call until the trial of a new version."""
        if version not in self.proven and version not in self._refused:
            self.needs_trial = True

    def prove(self, version: str) -> None:
        """The trial of a version passed. A no-op if the version was refused."""
        self.needs_trial = False
        if version not in self._refused:
            self.proven.add(version)
            self.fault = None

    def refuse(self, version: str, mismatch: RowsMismatch) -> None:
        """The trial of a version failed, or a call did not have the rows of its requests."""
        self._refused.add(version)
        self.proven.discard(version)
        text = f"requests of pipeline '{self.pipeline}' do not share calls: {mismatch}"
        self.needs_trial, self.fault = False, Finding("coalescing", text, tensor=mismatch.output or None)

    async def run_trial(
        self, engine: Engine, declared: Sequence[InferenceRequest], varied: Sequence[InferenceRequest], timeout_s: float
    ) -> None:
        """Uses the examples that may share a call with the sample, or else the varied requests."""
        sample, *examples = declared
        others = [each for each in examples if key_of(each) == key_of(sample)] or varied
        fitting = [each for each in (sample, *others) if rows_of(each) == rows_of(sample)]
        different = {b"".join(part for one in each.inputs for part in raw_parts(one)): each for each in fitting}
        trial = _Trial(engine, self, timeout_s)
        try:
            await trial.run([replace(each, is_probe=True) for each in different.values()])
        except RowsMismatch as exc:
            self.refuse(trial.version, exc)
            _log.error("requests of pipeline '%s' do not share calls: %s", self.pipeline, exc)
        else:
            self.prove(trial.version)


class Joinable(Extension):
    """Marks a request that may share a call with others of its pipeline."""

    is_for_streams = False  # a stream does not show with whom it shares a call
    coalescing: Coalescing


_Alone = tuple[InferenceRequest, InferenceResponse]


class _Trial:
    def __init__(self, engine: Engine, coalescing: Coalescing, timeout_s: float) -> None:
        self._engine = engine
        self._coalescing = coalescing
        self._timeout_s = timeout_s
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
            raise RowsMismatch("the sample leaves no room for another request in the same call")
        if len(alone) == 1:
            raise RowsMismatch("the gateway knows no input but the sample: declare different ones as `examples`")
        if all(_is_same(tensor, each.outputs[name]) for _, each in alone for name, tensor in first.outputs.items()):
            text = "the model answers every input of the trial alike: declare `examples` with different answers"
            raise RowsMismatch(text)
        await self._in_batch([alone[1], alone[0]])
        # as many members as may share a call, in a mixed order
        room, random, mixed = min(self._coalescing.max_items, LARGEST_BATCH), Random(0), list[_Alone]()
        while True:
            member = alone[random.randrange(len(alone))]
            room -= rows_of(member[0]) or 1
            if room < 0:
                break
            mixed.append(member)
        if len(mixed) > 2:
            await self._in_batch(mixed)

    async def _in_batch(self, members: Sequence[_Alone]) -> None:
        requests = [request for request, _ in members]
        request = replace(joined(requests), is_probe=True)
        try:
            response = await self._call(request)
        except (ModelError, ContractViolation) as exc:
            text = f"the model fails with {len(requests)} requests in one call: {exc.detail}"
            raise RowsMismatch(text) from exc
        rows = [rows_of(each) or 1 for each in requests]
        for own, (_, alone) in zip(cut(response, request, rows, self._coalescing.outputs), members, strict=True):
            self._compare(alone, own, f"differs between a request alone and the same in a batch of {sum(rows)}")

    async def _alone(self, request: InferenceRequest) -> InferenceResponse:
        response = await self._call(replace(request, request_id=new_request_id()))
        rows = rows_of(request)
        if rows is None:
            raise RowsMismatch("the inputs of the sample do not have the same number of rows")
        return cut(response, request, [rows], self._coalescing.outputs)[0]

    async def _call(self, request: InferenceRequest) -> InferenceResponse:
        response = await self._engine.infer(request, Deadline.after(self._timeout_s))
        if self.version and response.version != self.version:
            raise ModelNotReady(f"The version of model '{request.model}' changed during the trial.")
        self.version = response.version
        return response

    def _compare(self, expected: InferenceResponse, found: InferenceResponse, text: str) -> None:
        for name, tensor in expected.outputs.items():
            other = found.outputs.get(name)
            if other is None or not _is_same(tensor, other, self._coalescing.tolerance):
                small = "; `tolerance` accepts small differences of floats"
                raise RowsMismatch(text + small * (tensor.datatype in FLOAT_DATATYPES), name)


def _is_same(one: Tensor, other: Tensor, tolerance: float = 0.0) -> bool:
    if (one.datatype, one.shape) != (other.datatype, other.shape):
        return False
    if b"".join(raw_parts(one)) == b"".join(raw_parts(other)):
        return True
    if not tolerance or one.datatype not in FLOAT_DATATYPES:
        return False
    first, second = one.array.astype(np.float64), other.array.astype(np.float64)
    return bool(np.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True))
