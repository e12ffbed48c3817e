"""Decodes JSON lists of numbers, flat or nested, to arrays.

A field's codec is selected when its pipeline is compiled. simdjson reads a list into a buffer, without a Python object
for each number. If simdjson or the bounds reject the list, msgspec decodes it again. Only msgspec's result determines
whether the list is rejected, and the message. Without simdjson, which has no wheel for Python 3.14, msgspec decodes all
lists. docs/decisions/0005-bodies-and-json.md has the figures.
"""

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta

from app.codecs.json_scan import PIECE_BYTES, WHITESPACE, malformed
from app.codecs.kinds import RANGE_BY_DATATYPE, ToArray
from app.core.inference import DTYPE_BY_DATATYPE, FLOAT_DATATYPES, INTEGER_DATATYPES, Array

_INT64 = np.iinfo(np.int64)
_COMMA, _OPENING, _CLOSING = b",[]"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that are accepted; None: any."""

    minimum: float | None = None
    maximum: float | None = None
    enum: Sequence[Any] | None = None


ANY_NUMBER = Bounds()


def number_type(datatype: str, bounds: Bounds) -> Any:
    """Returns the type with which msgspec decodes, checks and describes one number, or one boolean for BOOL.

    Raises ValueError.
    """
    if datatype == "BOOL":
        return bool
    return integer_type(datatype, bounds) if datatype in INTEGER_DATATYPES else float_type(bounds)


def integer_type(datatype: str, bounds: Bounds) -> Any:
    """Only bounds within INT64 are part of the type; numpy checks those of UINT64. Raises ValueError."""
    low, high = RANGE_BY_DATATYPE[datatype]
    if bounds.enum:
        if not all(type(value) is int and low <= value <= min(high, _INT64.max) for value in bounds.enum):
            raise ValueError("has an enum whose values are not all integers within the datatype")
        return Literal[tuple(bounds.enum)]
    low = low if bounds.minimum is None else max(low, math.ceil(bounds.minimum))
    high = high if bounds.maximum is None else min(high, math.floor(bounds.maximum))
    if low > high or low > _INT64.max or (bounds.maximum is not None and high > _INT64.max):
        raise ValueError("has bounds that no value of its datatype can meet, or beyond 2**63-1")
    return Annotated[int, Meta(ge=low, le=high if high <= _INT64.max else None)]


def float_type(bounds: Bounds) -> Any:
    schema = {"enum": bounds.enum} if bounds.enum else None
    if bounds.minimum is None and bounds.maximum is None and schema is None:
        return float
    return Annotated[float, Meta(ge=bounds.minimum, le=bounds.maximum, extra_json_schema=schema)]


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


@dataclass(frozen=True, slots=True)
class NumberCodec:
    """Decodes flat JSON lists of numbers of one datatype.

    ``lists``: with a Python list, in which None is NaN. ``of_type``: simdjson's type of buffer, and ``narrowed`` the
    conversion of its numbers to ``dtype``, which may raise ValueError; None to use only ``lists``.
    """

    dtype: np.dtype[Any]
    lists: ToArray
    of_type: _BufferType | None = None
    narrowed: ToArray | None = None

    def decode(self, text: bytes) -> Array:
        """Raises msgspec.DecodeError or ValueError."""
        if self.of_type is not None and self.narrowed is not None:
            try:
                parsed = cast("simdjson.Array", _parser.parse(text))
                return self.narrowed(np.frombuffer(parsed.as_buffer(of_type=self.of_type), _WIDEST[self.of_type]))
            except _REFUSALS:
                pass
        return self.lists(text)


_WORD_BY_LITERAL = {
    b"-NaN": b"null",
    b"NaN": b"null",
    b"-Infinity": b"false",
    b"Infinity": b"true",
    b"-Inf": b"false",
    b"Inf": b"true",
}
"""The literals that RapidJSON, and so Triton, reads as numbers although they are not JSON -> words of JSON. A literal
next to other characters stays invalid JSON."""
_NO_NUMBERS = (b"null", b"true", b"false", b'"')
_decode_words = msgspec.json.Decoder(list[float | bool | None]).decode


def _with_literals(finite: ToArray, to_array: ToArray) -> ToArray:
    """Decodes lists of floats with NaN and infinity as literals, which ``finite`` rejects as text that is not JSON."""

    def decode(text: bytes) -> Array:
        try:
            return finite(text)
        except msgspec.DecodeError as exc:
            if isinstance(exc, msgspec.ValidationError) or any(other in text for other in _NO_NUMBERS):
                raise
        for literal, word in _WORD_BY_LITERAL.items():
            text = text.replace(literal, word)
        values = _decode_words(text)
        infinite = {i: math.inf if value else -math.inf for i, value in enumerate(values) if isinstance(value, bool)}
        array = to_array([0.0 if isinstance(value, bool) else value for value in values])
        array[list(infinite)] = list(infinite.values())
        return array

    return decode


def number_codec(
    datatype: str,
    to_array: ToArray,
    bounds: Bounds = ANY_NUMBER,
    *,
    takes_null: bool = False,
    takes_literals: bool = False,
) -> NumberCodec:
    """Selects the codec of a tensor. Raises ValueError.

    Args:
        datatype: of the tensor.
        to_array: the conversion of a list or an array of numbers.
        bounds: of each number.
        takes_null: whether ``null`` is a number of a float tensor, NaN.
        takes_literals: whether ``NaN`` and ``Infinity`` are numbers of a float tensor.
    """
    dtype, is_float, element = DTYPE_BY_DATATYPE[datatype], datatype in FLOAT_DATATYPES, number_type(datatype, bounds)
    decode = msgspec.json.Decoder(list[element | None] if takes_null else list[element]).decode  # type: ignore[valid-type]

    lists: ToArray = lambda text: to_array(decode(text))  # noqa: E731 - has two forms
    if takes_literals and is_float:
        lists = _with_literals(lists, to_array)
    if not HAS_SIMDJSON or datatype == "BOOL" or (bounds.enum and not is_float):
        return NumberCodec(dtype, lists)
    low, high = (-math.inf, math.inf) if is_float else RANGE_BY_DATATYPE[datatype]
    low = low if bounds.minimum is None else max(low, bounds.minimum)
    high = high if bounds.maximum is None else min(high, bounds.maximum)

    def narrowed(numbers: Array) -> Array:
        if numbers.min().item() < low or numbers.max().item() > high:
            raise ValueError(f"holds a number that is not between {low} and {high}")
        return to_array(numbers)

    of_type: _BufferType = "d" if is_float else "u" if datatype == "UINT64" else "i"
    return NumberCodec(dtype, lists, of_type, to_array if (low, high) == (-math.inf, math.inf) else narrowed)


class _Parser(threading.local):
    """One parser for each thread. It keeps memory for the longest text so far, 14 times its size."""

    @cached_property
    def parse(self) -> Callable[[bytes], Any]:
        return simdjson.Parser(max_capacity=_MAX_TEXT_BYTES).parse


_parser = _Parser()


_NO_SKELETON = bytes(code for code in range(256) if code not in b"[],")
_OPENINGS = re.compile(rb"[\[ \t\n\r]*")
_BRACKETS_TO_SPACES = bytes.maketrans(b"[]", b"  ")
_INDEX = re.compile(r"\$\[(\d+)\]")


def read_numbers(
    text: memoryview, depth: int, codec: NumberCodec, check_shape: Callable[[tuple[int, ...]], object]
) -> Array:
    """Decodes a large array of numbers from JSON, with ``depth`` levels of nesting, without building a Python list.

    The shape follows from the brackets and commas, and is checked before any number is decoded. Then the numbers are
    decoded as flat lists, piece by piece. ``check_shape`` raises ValueError for a wrong shape.

    Raises InvalidJson, ValueError or msgspec.DecodeError.
    """
    shape = _shape_of(text, depth)
    check_shape(shape)
    size = math.prod(shape)

    def arrays() -> Iterator[Array]:
        """Yields the numbers in order, as flat arrays."""
        start = 0
        for piece in _pieces_of(text):
            try:
                if b"[" in piece or b"]" in piece:
                    piece = piece.translate(_BRACKETS_TO_SPACES)  # noqa: PLW2901 - without its brackets
                numbers = codec.decode(b"[" + piece + b"]")
            except msgspec.ValidationError as exc:
                problem = str(exc)
                if found := _INDEX.search(problem):  # shows the position of the number in the whole array
                    index = np.unravel_index(min(start + int(found[1]), size - 1), shape)
                    problem = problem.replace(found[0], "$" + "".join(f"[{each}]" for each in index))
                raise msgspec.ValidationError(problem) from None
            start += len(numbers)
            if start > size:
                break
            yield numbers
        if start != size:
            raise malformed()

    if size * codec.dtype.itemsize > 2 * len(text):  # much larger than its text, so allocated only for valid numbers
        for _ in arrays():
            pass
    array, end = np.empty(size, codec.dtype), 0
    for part in arrays() if size else ():
        array[end : end + len(part)] = part
        end += len(part)
    return array.reshape(shape)


def _shape_of(text: memoryview, depth: int) -> tuple[int, ...]:
    """Returns the shape of regular lists, from their brackets and commas. Raises ValueError or InvalidJson."""
    found = _OPENINGS.match(text)
    nesting = found[0].count(b"[") if found else 0
    if nesting <= depth:
        if depth == nesting == 1 and (size := _flat_size(text)):
            return (size,)
        skeleton, has_numbers, has_empty_lists = _skeleton_of(text)
    if nesting > depth or (nesting < depth and not (nesting and has_empty_lists)):
        raise ValueError(f"must be nested {depth} lists deep, not {nesting}")
    shape = _regular_shape(skeleton, nesting)
    if shape is None or (has_empty_lists and has_numbers):
        raise ValueError("has lists of different lengths")
    return (*shape[:-1], 0) if has_empty_lists else shape


def _flat_size(text: memoryview) -> int:
    """The number of elements of a list; 0 if it has fewer than two, or may have elements that are not numbers."""
    _, closing, after = bytes(text[-PIECE_BYTES:]).rpartition(b"]")
    if not closing or after.strip(WHITESPACE):
        return 0
    opening = _OPENINGS.match(text)
    end, commas = len(text) - len(after) - len(closing), 0
    for start in range(opening.end() if opening else 0, end, PIECE_BYTES):
        piece = bytes(text[start : min(start + PIECE_BYTES, end)])
        if any(code in piece for code in b'[]{"'):
            return 0
        commas += int(np.count_nonzero(np.frombuffer(piece, dtype=np.uint8) == _COMMA))
    return commas + 1 if commas else 0


def _skeleton_of(text: memoryview) -> tuple[bytearray, bool, bool]:
    """Returns the brackets and commas, whether there are numbers, and whether there are empty lists.

    Raises ValueError or InvalidJson.
    """
    skeleton, has_numbers, has_empty_lists, last = bytearray(), False, False, b""
    for start in range(0, len(text), PIECE_BYTES):
        piece = bytes(text[start : start + PIECE_BYTES])
        piece = last + (piece.translate(None, WHITESPACE) if any(code in piece for code in WHITESPACE) else piece)
        if b'"' in piece or b"{" in piece:
            raise ValueError("holds something other than numbers")
        opens, closes, commas = (np.frombuffer(piece, np.uint8) == code for code in (_OPENING, _CLOSING, _COMMA))
        if (opens[1:] > (opens | commas)[:-1]).any() or (closes[:-1] > (closes | commas)[1:]).any():
            raise malformed()  # a comma is missing between a list and an adjacent number or list
        has_empty_lists |= bool((opens[:-1] & closes[1:]).any())
        marks = piece[len(last) :].translate(None, _NO_SKELETON)
        has_numbers |= len(marks) < len(piece) - len(last)
        skeleton += marks
        last = piece[-1:]
    return skeleton, has_numbers, has_empty_lists


def _regular_shape(skeleton: bytearray, depth: int) -> tuple[int, ...] | None:
    """Returns the shape if all lists of a level have the same structure; otherwise None."""
    codes = np.frombuffer(skeleton, dtype=np.uint8)
    shape: tuple[int, ...] = ()
    block = codes[:0]
    for level in range(1, depth + 1):
        start, end = depth - level, skeleton.find(b"]" * level) + level
        inside, unit = codes[start + 1 : end - 1], np.append(block, np.uint8(_COMMA))
        count = (len(inside) + 1) // len(unit)
        repeated = inside[: (count - 1) * len(unit)] if count * len(unit) == len(inside) + 1 else None
        if repeated is None or not (repeated.reshape(-1, len(unit)) == unit).all():
            return None
        if not np.array_equal(inside[len(repeated) :], block):
            return None
        block, shape = codes[start:end], (count, *shape)
    return shape if len(block) == len(codes) else None


def _pieces_of(text: memoryview) -> Iterator[bytes]:
    """Yields pieces of about PIECE_BYTES, cut at commas."""
    start, size = 0, PIECE_BYTES
    while start + size < len(text):
        piece = bytes(text[start : start + size])
        cut = piece.rfind(b",")
        if cut < 0:
            size *= 2
            continue
        yield piece[:cut]
        start, size = start + cut + 1, PIECE_BYTES
    yield bytes(text[start:])
