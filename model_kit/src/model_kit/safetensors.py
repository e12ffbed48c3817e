"""Weights in the safetensors format, read where they lie: mapped, so that processes share the pages.

https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
LENGTH_BYTES = 8


def mapped(path: Path) -> Mapping[str, np.ndarray]:
    """The tensors of a file by name, read-only views of one mapping of it.

    Raises:
        KeyError: a tensor is neither F32 nor I64.
    """
    file = np.memmap(path, np.uint8, mode="r")
    header_bytes = int(file[:LENGTH_BYTES].view("<u8")[0])
    data = file[LENGTH_BYTES + header_bytes :]
    header = json.loads(file[LENGTH_BYTES : LENGTH_BYTES + header_bytes].tobytes())
    return {name: _tensor(data, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(data: np.ndarray, entry: Mapping[str, object]) -> np.ndarray:
    start, end = entry["data_offsets"]
    # A plain array: np.memmap would follow every result computed from it.
    return np.asarray(data[start:end]).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
