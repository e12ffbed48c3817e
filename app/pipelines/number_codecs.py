"""Codecs that decode flat JSON lists of numbers to arrays. A field's codec is selected when its pipeline is compiled.

simdjson reads a list into a buffer, without a Python object for each number. If simdjson or the bounds reject the list,
msgspec decodes it again. Only msgspec's result determines whether the list is rejected, and the message.
docs/decisions/0026-compiled-codecs.md has the figures. Without simdjson, which has no wheel
for Python 3.14, msgspec decodes all lists.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, cast

import msgspec
import numpy as np

from app.domain.tensor import DTYPE_BY_DATATYPE, FLOAT_DATATYPES, Array
from app.pipelines.json_types import ANY_NUMBER, Bounds, number_type
from app.pipelines.kinds import ToArray, narrowing_to

try:
    import simdjson
except ModuleNotFoundError:
    HAS_SIMDJSON = False
else:
    HAS_SIMDJSON = True

_BufferType = Literal["d", "i", "u"]
_WIDEST = {"d": np.dtype(np.float64), "i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
"""simdjson's buffer types -> their dtypes."""
_MAX_TEXT_BYTES = 128 * 1024
"""Larger than a piece of a body, unless the body has no comma."""
_REFUSALS = (ValueError, TypeError, RuntimeError)
"""The exceptions of simdjson, and the codec's own ValueError."""


class NumberCodec(Protocol):
    """The interface of codecs for lists of numbers."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the arrays."""

    def decode(self, text: bytes) -> Array:
        """Decodes a flat JSON list of numbers. Raises msgspec.DecodeError or ValueError."""


class ListCodec:
    """Decodes numbers of any datatype with a Python list."""

    def __init__(self, element: Any, datatype: str, to_array: ToArray) -> None:
        self.dtype = DTYPE_BY_DATATYPE[datatype]
        self._decode = msgspec.json.Decoder(list[element]).decode
        self._to_array = to_array

    def decode(self, text: bytes) -> Array:
        return self._to_array(self._decode(text))


@dataclass(frozen=True, slots=True)
class BufferCodec:
    """Decodes numbers without Python objects. Falls back to ``others`` if ``narrowed`` or simdjson rejects a list.

    ``narrowed`` converts a float64, int64 or uint64 array (see ``of_type``) to ``dtype``. It may raise ValueError.
    """

    dtype: np.dtype[Any]
    of_type: _BufferType
    narrowed: ToArray
    others: NumberCodec

    def decode(self, text: bytes) -> Array:
        try:
            return self.narrowed(np.frombuffer(_buffer_of(text, self.of_type), _WIDEST[self.of_type]))
        except _REFUSALS:
            return self.others.decode(text)


def number_codec(datatype: str, to_array: ToArray, bounds: Bounds = ANY_NUMBER) -> NumberCodec:
    """``to_array``: the conversion of lists that simdjson does not support. Raises ValueError."""
    lists = ListCodec(number_type(datatype, bounds), datatype, to_array)
    if not HAS_SIMDJSON:
        return lists
    if datatype in FLOAT_DATATYPES:
        return BufferCodec(lists.dtype, "d", _within(bounds, narrowing_to(datatype)), lists)
    if datatype == "BOOL" or bounds.enum:
        return lists
    limits = np.iinfo(lists.dtype)
    narrowed = _between(limits.min, limits.max, lambda numbers: numbers.astype(lists.dtype, copy=False))
    return BufferCodec(lists.dtype, "u" if datatype == "UINT64" else "i", _within(bounds, narrowed), lists)


def _within(bounds: Bounds, narrowed: ToArray) -> ToArray:
    """Wraps ``narrowed`` with a check of the bounds, which raises ValueError."""
    low, high = bounds.minimum, bounds.maximum
    if low is None and high is None:
        return narrowed
    return _between(-math.inf if low is None else low, math.inf if high is None else high, narrowed)


def _between(low: float, high: float, narrowed: ToArray) -> ToArray:
    def narrowed_between(numbers: Array) -> Array:
        if numbers.min().item() < low or numbers.max().item() > high:
            raise ValueError(f"holds a number that is not between {low} and {high}")
        return narrowed(numbers)

    return narrowed_between


class _Parser(threading.local):
    """One parser for each thread. It keeps memory for the longest text so far, 14 times its size."""

    @cached_property
    def parse(self) -> Callable[[bytes], Any]:
        return simdjson.Parser(max_capacity=_MAX_TEXT_BYTES).parse


_parser = _Parser()


def _buffer_of(text: bytes, of_type: _BufferType) -> bytes:
    return cast("simdjson.Array", _parser.parse(text)).as_buffer(of_type=of_type)
