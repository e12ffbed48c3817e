"""The form of a tensor in the table of kinds, such as ``FP32[3,640,640]``, ``INT64[1..512]?`` or ``BYTES[1] of 0..9``.

A dimension ``a..b`` is free (-1 in Triton's configuration) and has a random size from ``a`` to ``b``. ``?`` marks an
optional input. ``of a..b`` is the number of characters of each text, or of bytes with ``raw``, which is rarely UTF-8.
"""

import math
import re
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FORM = re.compile(r"(\w+)\[([^\]]*)\](\??)(?: of (\d+)\.\.(\d+))?( raw)?")
DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": np.uint16,  # the upper half of an FP32
    "BYTES": np.object_,
}
LETTERS = 'abcdefghij \n"\\<é日😀'


class Range(NamedTuple):
    low: int
    high: int

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True)
class Form:
    datatype: str
    sizes: tuple[Range, ...]
    is_free: tuple[bool, ...]
    is_optional: bool
    characters: Range
    is_raw: bool

    @classmethod
    def of(cls, text: str) -> "Form":
        found = FORM.fullmatch(text)
        assert found, text
        datatype, dims, optional, low, high, raw = found.groups()
        ends = [dim.partition("..") for dim in dims.split(",") if dim]
        return cls(
            datatype=datatype,
            sizes=tuple(Range(int(first), int(last or first)) for first, _, last in ends),
            is_free=tuple(bool(dots) for _, dots, _ in ends),
            is_optional=bool(optional),
            characters=Range(int(low or 0), int(high or 40)),
            is_raw=bool(raw),
        )

    @property
    def dims(self) -> list[int]:
        """The dimensions as in a configuration."""
        return [-1 if free else size.low for free, size in zip(self.is_free, self.sizes, strict=True)]

    @property
    def most_elements(self) -> int:
        return math.prod(size.high for size in self.sizes)

    def array(self, random: Random, batch: tuple[int, ...] = ()) -> NDArray[np.generic]:
        shape = (*batch, *(size.draw(random) for size in self.sizes))
        values = np.random.default_rng(random.getrandbits(64))
        if self.datatype == "BYTES":
            return self._elements(random, shape)
        if self.datatype == "BF16":
            wide = (values.integers(-128, 128, shape) / 8).astype(np.float32)
            return (wide.view(np.uint32) >> 16).astype(np.uint16)
        dtype = np.dtype(DTYPES[self.datatype])
        if dtype.kind == "f":
            return (values.integers(-1024, 1024, shape) / 64).astype(dtype)
        if dtype.kind == "b":
            return values.integers(0, 2, shape).astype(dtype)
        limits = np.iinfo(dtype)  # type: ignore[arg-type]
        return values.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)  # type: ignore[arg-type]

    def _elements(self, random: Random, shape: tuple[int, ...]) -> NDArray[np.object_]:
        array = np.empty(shape, np.object_)
        for index in np.ndindex(shape):
            size = self.characters.draw(random)
            array[index] = random.randbytes(size) if self.is_raw else "".join(random.choices(LETTERS, k=size)).encode()
        return array
