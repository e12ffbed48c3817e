"""Finds the structure of a JSON text, outside its strings, piece by piece and without decoding it.

A decoder holds the interpreter's lock for its whole call and builds everything that the text describes. Here the text
is read in pieces of PIECE_BYTES, so that its depth, its members and the number of its elements are known, and can be
refused, before anything is built. docs/decisions/0005-bodies-and-json.md has the figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from app.core.errors import InvalidJson, InvalidRequest
from app.core.inference import Array

MAX_DEPTH = 64
"""How many lists and objects may stand inside each other."""
PIECE_BYTES = 64 * 1024
MAX_CHECKED_BYTES = 1024 * 1024
"""A larger text that is refused anyway is not decoded once more to see whether it is JSON at all."""

_QUOTE, _COMMA, _COLON, _OPENING, _CLOSING, _OBJECT_END = b'",:[]}'
_DEPTH_CHANGE = np.zeros(256, dtype=np.int64)
_DEPTH_CHANGE[list(b"[{")] = 1
_DEPTH_CHANGE[list(b"]}")] = -1
_IS_BRACKET = bytes(code in b"[]{}" for code in range(256))
_IS_MARK = bytes(code in b"[]{},:" for code in range(256))
_IS_BETWEEN_MEMBERS = np.isin(np.arange(256), list(b"[{,:"))
WHITESPACE = b" \t\n\r"
_decode_name = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Marks:
    """The brackets, braces, commas and colons of one piece that stand outside strings, as arrays of one length."""

    positions: Array
    characters: Array
    depths: Array
    """How many lists and objects are open after each character."""


def marks_of(text: memoryview, commas_to_depth: int = MAX_DEPTH) -> Iterator[Marks]:
    """Pieces that lie deeper than ``commas_to_depth`` come without their commas and colons.

    Raises InvalidJson where the text is nested too deeply, or ends inside a string, a list or an object.
    """
    start, depth, is_inside_string = 0, 0, False
    while start < len(text):
        piece = _without_escapes(bytes(text[start : start + PIECE_BYTES]))
        depths = None if is_inside_string else _depths_among_numbers(piece, depth)
        if depths is not None and commas_to_depth < depths.min() and depths.max() <= MAX_DEPTH:
            start, depth = start + len(piece), int(depths[-1])
            continue
        wanted = _IS_MARK if depth <= commas_to_depth else _IS_BRACKET
        marks, ends_inside_string = _marks_in(piece, wanted, depth, is_inside_string)
        if wanted is _IS_BRACKET and marks.depths.min(initial=depth) <= commas_to_depth:
            marks, ends_inside_string = _marks_in(piece, _IS_MARK, depth, is_inside_string)
        if marks.depths.max(initial=0) > MAX_DEPTH:
            raise InvalidJson(f"The body has too many nested levels: more than {MAX_DEPTH} levels.")
        yield Marks(marks.positions + start, marks.characters, marks.depths)
        start, is_inside_string = start + len(piece), ends_inside_string
        depth = int(marks.depths[-1]) if len(marks.depths) else depth
    if depth != 0 or is_inside_string:
        raise malformed()


def _marks_in(piece: bytes, wanted: bytes, depth: int, is_inside_string: bool) -> tuple[Marks, bool]:
    """The marks of one piece, and whether the piece ends inside a string. ``depth``: before the piece."""
    has_quotes = b'"' in piece
    if is_inside_string and not has_quotes:
        piece = b""
    codes = np.frombuffer(piece, dtype=np.uint8)
    is_wanted = np.frombuffer(piece.translate(wanted), dtype=np.bool_)
    if has_quotes:
        is_string = np.logical_xor.accumulate(codes == _QUOTE) ^ is_inside_string
        is_wanted, is_inside_string = is_wanted & ~is_string, bool(is_string[-1])
    positions = np.flatnonzero(is_wanted)
    characters = codes[positions]
    return Marks(positions, characters, depth + np.cumsum(_DEPTH_CHANGE[characters])), is_inside_string


def _depths_among_numbers(piece: bytes, depth: int) -> Array | None:
    """How many lists are open at first, and after each bracket; None if there are strings or objects in the piece.

    ``depth``: before the piece.
    """
    if b'"' in piece or b"{" in piece or b"}" in piece:
        return None
    if b"[" not in piece and b"]" not in piece:
        return np.array([depth])
    codes = np.frombuffer(piece, dtype=np.uint8)
    brackets = codes[np.flatnonzero((codes == _OPENING) | (codes == _CLOSING))]
    return np.cumsum(np.concatenate(([depth], _DEPTH_CHANGE[brackets])))


def check_depth(text: memoryview) -> None:
    """Raises InvalidJson where the text is nested more than MAX_DEPTH levels deep."""
    if len(text) > 2 * MAX_DEPTH:
        for _ in marks_of(text, commas_to_depth=-1):
            pass


def has_more_elements(text: memoryview, limit: int) -> bool:
    """Whether the lists in the text hold more than ``limit`` elements; stops reading at the first that is too many."""
    commas = 0
    for marks in marks_of(text):
        commas += int(np.count_nonzero(marks.characters == _COMMA))
        if commas >= max(limit, 1):
            return True
    return False


def members_of(text: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Name and value of each member of the object that the text is, in order. The values are not decoded or checked.

    Raises InvalidJson where the members are malformed, and InvalidRequest where the text is not an object.
    """
    marks, at_end = _marks_between_members(text), (len(text), "")
    position, character = next(marks, at_end)
    if character != "{" or not _is_blank(text[:position]):
        if not is_json(text):
            raise malformed()
        raise InvalidRequest("The body must be one JSON object.", hint='Send {"<input>": <value>, ...}.')
    start, is_empty = position + 1, True
    while character != "}":
        position, character = next(marks, at_end)
        if character == "}" and is_empty and _is_blank(text[start:position]):
            break
        if character != ":":
            raise malformed()
        try:
            name = _decode_name(text[start:position])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise malformed() from exc
        start = position + 1
        position, character = next(marks, at_end)
        if character not in {",", "}"}:
            raise malformed()
        yield name, text[start:position]
        start, is_empty = position + 1, False
    if next(marks, None) is not None or not _is_blank(text[position + 1 :]):
        raise malformed()


def spans_of(text: memoryview, name: str, depth: int) -> Iterator[tuple[int, int]]:
    """Start and end of the value of each member ``name`` whose object is ``depth`` deep. The values are not checked.

    Raises InvalidJson.
    """
    quoted, start, value_at = b'"%b"' % name.encode(), 0, -1
    for marks in marks_of(text, commas_to_depth=depth):
        is_end = (marks.depths == depth - 1) & (marks.characters == _OBJECT_END)
        kept = is_end | ((marks.depths == depth) & _IS_BETWEEN_MEMBERS[marks.characters])
        for position, character in zip(marks.positions[kept].tolist(), marks.characters[kept].tolist(), strict=True):
            if character == _COLON:
                value_at = position + 1 if bytes(text[start:position]).strip(WHITESPACE) == quoted else -1
                continue
            if value_at >= 0:
                yield value_at, position
            start, value_at = position + 1, -1


def is_json(text: memoryview) -> bool:
    """Whether a refused text is JSON; a text larger than MAX_CHECKED_BYTES counts as JSON without a check."""
    if len(text) > MAX_CHECKED_BYTES:
        return True
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def malformed() -> InvalidJson:
    return InvalidJson("The body is not JSON.")


def _without_escapes(piece: bytes) -> bytes:
    """The piece with its escaped characters blotted out; an escape that the piece's end cuts in two is left out."""
    if b"\\" not in piece:
        return piece
    piece = piece.replace(b"\\\\", b"__")
    if piece.endswith(b"\\") and len(piece) > 1:
        piece = piece[:-1]
    return piece.replace(b'\\"', b"__")


def _marks_between_members(text: memoryview) -> Iterator[tuple[int, str]]:
    """Position and character of the outermost braces, and of the commas and colons between them."""
    for marks in marks_of(text, commas_to_depth=1):
        kept = (marks.depths <= 0) | ((marks.depths == 1) & _IS_BETWEEN_MEMBERS[marks.characters])
        yield from zip(marks.positions[kept].tolist(), marks.characters[kept].tobytes().decode("ascii"), strict=True)


def _is_blank(text: memoryview) -> bool:
    return not bytes(text).strip(WHITESPACE)
