"""The models' side of ``GATEWAY_LOG_TENSORS=shapes``: a line in Triton's log for each response, never a value.

The line has the gateway's own words for a response (name, datatype, shape), under the id that the gateway gave the
request, so that both ends of a tensor's way can be laid side by side.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_IS_ON = os.environ.get("GATEWAY_LOG_TENSORS") == "shapes"
_DATATYPE_BY_NUMPY = {"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "object": "BYTES"}


def notes_on(request: Any) -> Callable[[Mapping[str, np.ndarray]], None]:
    """Returns a function that logs each response; it keeps the request's id, but not the request."""
    if not _IS_ON:
        return lambda outputs: None
    request_id = request.request_id()
    return lambda outputs: pb_utils.Logger.log_info(line_of(request_id, outputs))


def line_of(request_id: str, outputs: Mapping[str, np.ndarray]) -> str:
    tensors = " ".join(f"{name}:{_datatype(array)}{list(array.shape)}" for name, array in outputs.items())
    return f"tensors triton_request_id={request_id} {tensors}"


def _datatype(array: np.ndarray) -> str:
    return _DATATYPE_BY_NUMPY.get(array.dtype.name, array.dtype.name.upper())
