"""Converts values of a field between JSON and arrays, by ``kind``, and compares their shapes with declared dims.

The conversions are selected once, when a pipeline is compiled.
"""

import base64
import binascii
import codecs
import json
import math
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import orjson

from app.core.inference import BYTES, DTYPE_BY_DATATYPE, FLOAT_DATATYPES, INTEGER_DATATYPES, Array, bytes_array
from app.core.model import TensorSpec

ToArray = Callable[[Any], Array]
"""Decoded value (JSON values for number and text, bytes for json, image, binary) -> array. Raises ValueError."""

FromArray = Callable[[Array], Any]
"""Array of any shape -> value for orjson, nested by shape. Raises ValueError."""

IMAGE_MAGIC: dict[str, tuple[int, bytes]] = {
    "PNG": (0, b"\x89PNG\r\n\x1a\n"),
    "JPEG": (0, b"\xff\xd8\xff"),
    "GIF": (0, b"GIF8"),
    "WebP": (8, b"WEBP"),
    "BMP": (0, b"BM"),
    "TIFF (little-endian)": (0, b"II*\x00"),
    "TIFF (big-endian)": (0, b"MM\x00*"),
}
"""Format -> the offset of its magic bytes, and the magic bytes."""

FILE_TYPES = ("image/*", "audio/*", "video/*", "application/pdf", "application/octet-stream")
"""The media types of a body that is a file."""
_UNKNOWN_TYPES = frozenset({"", "application/octet-stream", "binary/octet-stream"})
_NOT_BASE64 = "is not base64: send the content of the file as base64 or as a data: URL, not its path"
_PIECE = 256 * 1024
"""Bytes or characters that are converted in one step, so that other threads wait for at most a millisecond."""
_INTEGERS = {each: np.iinfo(DTYPE_BY_DATATYPE[each]) for each in INTEGER_DATATYPES}
_FLOATS = {each: ml_dtypes.finfo(DTYPE_BY_DATATYPE[each]) for each in FLOAT_DATATYPES}  # type: ignore[no-untyped-call]
RANGE_BY_DATATYPE: dict[str, tuple[float, float]] = {
    **{each: (info.min, info.max) for each, info in _INTEGERS.items()},
    **{each: (float(info.min), float(info.max)) for each, info in _FLOATS.items()},
    "BOOL": (0, 1),
}
"""The smallest and the largest number, except of BYTES."""
_FEW_NUMBERS = 1024
"""The limit for the quick check; numpy may use several threads for longer vectors."""


def to_array_of(kind: str, datatype: str) -> ToArray:
    if kind == "number":
        return _number_reader(datatype)

    def to_array(value: Any) -> Array:
        try:
            array = _mapped(value, str.encode) if kind == "text" else _mapped(value)
        except UnicodeEncodeError as exc:
            raise ValueError("holds half a surrogate pair") from exc
        for content in array.flat if kind == "image" else ():
            check_image(content)
        return array

    return to_array if datatype == BYTES else lambda value: numbers_of_bytes(to_array(value).item(), datatype)


def numbers_of_bytes(content: bytes | memoryview, datatype: str) -> Array:
    """The bytes of one text or file as 8-bit numbers. They are not copied."""
    return np.frombuffer(content, DTYPE_BY_DATATYPE[datatype])


def bytes_of_numbers(array: Array, rank: int) -> Array:
    """The reverse for each row: the last ``rank`` dimensions become one element of a BYTES array."""
    shape = array.shape[: max(array.ndim - rank, 0)]
    rows = array.reshape(math.prod(shape), -1) if array.size else [array] * math.prod(shape)
    return bytes_array([row.tobytes() for row in rows], (*shape, 1))


def from_array_of(kind: str, datatype: str, *, is_single: bool = False) -> FromArray:
    """``is_single``: the arrays have one element, which becomes a single value."""
    if kind == "number":
        if is_single:
            return np.ndarray.item
        # orjson itself writes numpy arrays, but not bfloat16, and NaN and infinity as null
        return partial(np.ascontiguousarray, dtype=np.float32) if datatype == "BF16" else np.ascontiguousarray
    convert: Callable[[bytes], Any] = _from_json
    if kind == "text":
        convert = lambda value: value.decode("utf-8", "replace")  # noqa: E731 - one of three forms
    elif kind != "json":
        convert = lambda value: base64.b64encode(value).decode("ascii")  # noqa: E731
    return lambda array: convert(array.item()) if is_single else _each(array, convert)


def _from_json(text: bytes) -> Any:
    """Python's own writer, which many models use, writes NaN and Infinity. They become None. Raises ValueError."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text, parse_constant=lambda _: None)


def kind_fits(kind: str, tensor: TensorSpec) -> bool:
    if kind != "number" and holds_bytes(tensor):
        return kind != "json"
    return (kind == "number") == (tensor.datatype != BYTES)


def holds_bytes(tensor: TensorSpec) -> bool:
    """Whether the tensor may be the bytes of one text or file: 8-bit numbers in one free dimension."""
    return tensor.datatype in ("UINT8", "INT8") and tensor.dims.count(-1) == 1 and math.prod(tensor.dims) == -1


def is_one_content(kind: str, tensor: TensorSpec) -> bool:
    """Whether the whole tensor, and not each element, is one text or file."""
    return kind != "number" and tensor.datatype != BYTES


def bytes_of_base64(text: str, kind: str) -> bytes:
    """Decodes base64 or a data URL (RFC 2397) whose media type matches the kind. Raises ValueError."""
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ValueError("is a data URL without base64 data")
        check_media_type(head.removeprefix("data:").partition(";")[0].strip().lower(), kind)
    if text.startswith(("http://", "https://")):
        raise ValueError("must be base64 or a data: URL; the gateway does not download addresses")
    if "=" in text[:-2]:
        raise ValueError(_NOT_BASE64)
    try:
        return b"".join(
            binascii.a2b_base64(text[start : start + _PIECE].encode("ascii"), strict_mode=True)
            for start in range(0, len(text), _PIECE)
        )
    except (binascii.Error, UnicodeEncodeError) as exc:
        raise ValueError(_NOT_BASE64) from exc


def json_bytes_of(text: bytes | bytearray | memoryview | msgspec.Raw) -> bytes:
    """Returns the bytes of a JSON value that the decoder skipped, after the check for UTF-8 that it omits."""
    content = bytes(text)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), _PIECE):
            decoder.decode(content[start : start + _PIECE])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as exc:
        raise ValueError("is not UTF-8 text") from exc
    return content


def converted(value: Any, json_type: Any, name: str) -> Any:
    """Converts a value of the configuration like a caller's. ``name``: what it is. Raises ValueError."""
    try:
        return msgspec.convert(value, json_type)
    except msgspec.ValidationError as exc:
        raise ValueError(f"has a {name} that does not fit: {exc}") from exc


def encoded_json(value: Any) -> bytes:
    """Encodes a decoded value. Raises ValueError for texts that are not Unicode."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError) as exc:
        raise ValueError("cannot be written as JSON") from exc


def is_file_type(media_type: str) -> bool:
    return media_type in FILE_TYPES or f"{media_type.partition('/')[0]}/*" in FILE_TYPES


def check_media_type(media_type: str, kind: str) -> None:
    """Raises ValueError. For unknown types, browsers and stores of files send one of ``_UNKNOWN_TYPES``."""
    if kind == "image" and not (media_type.startswith("image/") or media_type in _UNKNOWN_TYPES):
        raise ValueError("has content whose media type is not image/*")


def check_image(content: bytes) -> str:
    """Returns the media type. Raises ValueError if the magic bytes of no known format match."""
    for name, (start, magic) in IMAGE_MAGIC.items():
        if content[start : start + len(magic)] == magic:
            return f"image/{name.partition(' ')[0].lower()}"
    raise ValueError("is not an image of a known format (PNG, JPEG, GIF, WebP, BMP or TIFF)")


def _number_reader(datatype: str) -> ToArray:
    """Also converts arrays of numbers. NaN, which stands for a missing number, stays NaN."""
    dtype = DTYPE_BY_DATATYPE[datatype]
    largest = RANGE_BY_DATATYPE[datatype][1] if datatype in FLOAT_DATATYPES else None
    read_as = dtype if largest is None else np.dtype(np.float64)
    out_of_range = f"holds a number out of the range of {datatype}"

    def read(value: Any) -> Array:
        try:
            array = np.asarray(value, read_as)
        except OverflowError as exc:
            raise ValueError(out_of_range) from exc
        except ValueError as exc:
            raise ValueError("has lists of different lengths") from exc
        # If the sum of squares is in range, every number is: a quick check for nearly every small request.
        if largest is None or (array.size <= _FEW_NUMBERS and np.vdot(array, array) < largest * largest):
            return array.astype(dtype, copy=False)
        with np.errstate(over="ignore"):
            array = array.astype(dtype, copy=False)
        if np.isinf(array).any():
            raise ValueError(out_of_range)
        return array

    return read


def _mapped(value: Any, convert: Callable[[Any], bytes] = lambda content: content) -> Array:
    """Converts nested lists, or a single value, to an object array of bytes."""
    if not isinstance(value, list):
        array = np.empty((), dtype=np.object_)
        array[()] = convert(value)
        return array
    nested = np.array(value, dtype=np.object_)
    elements = nested.ravel().tolist()
    if any(isinstance(element, list) for element in elements):
        raise ValueError("has lists of different lengths")
    return bytes_array([convert(element) for element in elements], nested.shape)


def _each(array: Array, convert: Callable[[bytes], Any]) -> Any:
    if array.ndim == 1:
        return [convert(element) for element in array.tolist()]
    return [_each(row, convert) for row in array] if array.ndim else convert(array.item())


def shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(str(size) for size in shape) + "]"


def fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether a shape agrees with declared dims, where -1 is any size."""
    if shape == dims:
        return True
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110 - half the time of all()
        if dim not in (-1, size):
            return False
    return True


def agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a shape can agree with both declared dims."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


@lru_cache(maxsize=1024)
def declared_shape(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape that agrees with declared dims and has the same elements in the same order.

    Only dimensions of size 1 may be missing or extra. If several shapes agree, the first dimension, usually the batch,
    is taken as the missing or extra one. None if no shape agrees, or if it is not clear which.
    """
    if fits(shape, dims):
        return shape
    if dims[:1] == (1,) and fits(shape, dims[1:]):
        return (1, *shape)
    if shape[:1] == (1,) and fits(shape[1:], dims):
        return shape[1:]
    sizes = [size for size in shape if size != 1]
    begun: dict[int, list[tuple[int, ...]]] = {0: [()]}  # how many sizes have a dimension -> at most two such shapes
    for dim in dims:
        longer = defaultdict[int, list[tuple[int, ...]]](list)
        for placed, shapes in begun.items():
            if dim in (-1, 1):
                longer[placed] += [(*each, 1) for each in shapes]
            if placed < len(sizes) and dim in (-1, sizes[placed]):
                longer[placed + 1] += [(*each, sizes[placed]) for each in shapes]
        begun = {placed: shapes[:2] for placed, shapes in longer.items()}
    found = begun.get(len(sizes), [])
    return found[0] if len(found) == 1 else None


def as_datatype(array: Array, datatype: str) -> Array | None:
    """Converts numbers to the declared datatype. Floats are rounded, integers stay exact.

    Returns None if one of the two datatypes is BYTES, if floats would become integers, or if ``datatype`` cannot hold
    a number. NaN and infinity stay as they are.
    """
    dtype, is_float = DTYPE_BY_DATATYPE[datatype], datatype in FLOAT_DATATYPES
    were_floats = array.dtype.kind not in "biu"
    if datatype == BYTES or array.dtype.kind == "O" or (were_floats and not is_float):
        return None
    low, high = RANGE_BY_DATATYPE[datatype]
    if is_float and not were_floats:
        high = 2 ** (_FLOATS[datatype].nmant + 1)
        low = -high
    wide = array.astype(np.float64) if were_floats else array
    finite = wide[np.isfinite(wide)]
    is_held = not finite.size or low <= finite.min().item() <= finite.max().item() <= high
    return array.astype(dtype) if is_held else None


def is_bare_item(tensor: TensorSpec) -> bool:
    """Whether an item is a bare value rather than a list, batch aside."""
    return tensor.dims in ((), (1,))
