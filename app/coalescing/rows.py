"""Joins requests to one batch, and cuts the response into those of the requests. Pure.

The first dimension of every input and output is the batch. A response is cut only if each of its outputs has exactly
the rows of all requests; Triton does not check that.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from app.core.inference import BYTES, InferenceRequest, InferenceResponse, Tensor, new_request_id


class RowsMismatch(Exception):
    """Why requests must not share calls. ``output``: the one at fault; empty if there is none."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(f"output '{output}' {text}" if output else text)
        self.output = output


def rows_of(request: InferenceRequest) -> int | None:
    """Returns the size of the request's batch; None if its inputs do not have the same first dimension."""
    rows: int | None = None
    for tensor in request.inputs:
        shape = tensor.array.shape
        if not shape or (rows is not None and shape[0] != rows):
            return None
        rows = shape[0]
    return rows or None


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
        request.ends_by_hook,
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
    for count in rows:
        stop = start + count
        own = {name: Tensor(name, each.datatype, each.array[start:stop]) for name, each in response.outputs.items()}
        responses.append(InferenceResponse(own, version=response.version))
        start = stop
    return responses
