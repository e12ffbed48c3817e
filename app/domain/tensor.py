"""A named, typed array, in the words of the Open Inference Protocol."""

from typing import Any

import ml_dtypes
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

BYTES = "BYTES"

Array = NDArray[Any]

DTYPE_BY_DATATYPE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    BYTES: np.dtype(np.object_),
}
"""Open Inference Protocol datatype -> numpy dtype. The elements of a BYTES array are ``bytes``."""

INTEGER_DATATYPES = frozenset(name for name, dtype in DTYPE_BY_DATATYPE.items() if dtype.kind in "iu")
FLOAT_DATATYPES = frozenset({"FP16", "BF16", "FP32", "FP64"})


class Tensor(Struct, frozen=True, eq=False):
    """One tensor of a request or a response; ``array.dtype`` is the dtype of ``datatype``."""

    name: str
    datatype: str
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


def bytes_array(values: list[bytes], shape: tuple[int, ...]) -> Array:
    """Returns a BYTES array; numpy's constructor would cut trailing NULs and lose the rank of an empty array."""
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array if array.shape == shape else array.reshape(shape)
