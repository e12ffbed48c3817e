"""Parses forms in memory: ``multipart/form-data`` (RFC 7578), with files and texts as parts.

Starlette's parser, over the same library, keeps the last of two parts with the same name, and writes files to a disk.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from app.core.errors import FieldProblem, InvalidInput, InvalidRequest, UnsupportedMediaType
from app.pipelines.body import FilePart

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each malformed form
MAX_PARTS = 128
MAX_HEADERS = 8
"""Limit for the headers of one part."""
MAX_HEADER_BYTES = 1024
"""Limit for each of them, and for the request's Content-Type."""
WINDOW_BYTES = 1024 * 1024
"""How much of the body is copied at once for the parser."""
_CHARSETS = {b"utf-8", b"utf8", b"us-ascii", b""}


class _Parts:
    """The parts that the parser has found so far: the name and the content of each."""

    def __init__(self, boundary: bytes, max_parts: int) -> None:
        self.found: list[tuple[str, bytes]] = []
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_part_data": lambda data, start, end: self._pieces.append(data[start:end]),
                "on_part_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        self._max_parts = max_parts
        self._field, self._value = bytearray(), bytearray()

    def _begin(self) -> None:
        self._disposition = b""
        self._pieces: list[bytes] = []

    def _end_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _end(self) -> None:
        disposition, options = parse_options_header(self._disposition)
        if disposition != b"form-data" or b"name" not in options or len(self.found) == self._max_parts:
            raise _malformed()
        is_file = b"filename" in options or b"filename*=" in self._disposition
        content = b"".join(self._pieces)
        self.found.append((options[b"name"].decode(), FilePart(content) if is_file else content))


def parts_of(
    content_type: str, body: memoryview, lists: Collection[str] = (), max_parts: int = MAX_PARTS
) -> dict[str, bytes | list[bytes]]:
    """Parses a complete form in memory. Returns field -> content, a FilePart if the part has a file name.

    ``lists``: the fields that may have several parts. Their contents are lists, in the order of the parts.

    Raises UnsupportedMediaType, InvalidRequest or InvalidInput.
    """
    _, options = parse_options_header(content_type[:MAX_HEADER_BYTES])
    if options.get(b"charset", b"").lower() not in _CHARSETS:
        hint = "Send the form without a charset."
        raise UnsupportedMediaType("The charset of a form can only be UTF-8.", hint=hint)
    if not options.get(b"boundary"):
        raise _malformed()
    try:
        parts = _Parts(options[b"boundary"], max_parts)
        for start in range(0, len(body), WINDOW_BYTES):
            parts.parser.write(bytes(body[start : start + WINDOW_BYTES]))
    except (FormParserError, UnicodeDecodeError) as exc:
        raise _malformed() from exc
    if parts.parser.state != MultipartState.END:
        raise _malformed()
    check_given_once(name for name, _ in parts.found if name not in lists)
    contents: dict[str, bytes | list[bytes]] = {name: content for name, content in parts.found if name not in lists}
    for name in lists:
        if files := [content for each, content in parts.found if each == name]:
            contents[name] = files
    return contents


def check_given_once(names: Iterable[str]) -> None:
    """Raises InvalidInput."""
    problems = [FieldProblem(name, "is given twice") for name, count in Counter(names).items() if count > 1]
    if problems:
        raise InvalidInput("A field is given twice.", errors=problems)


def _malformed() -> InvalidRequest:
    return InvalidRequest(
        f"The multipart body is malformed or above a limit: {MAX_PARTS} parts besides lists of files, {MAX_HEADERS} "
        f"headers for each part, {MAX_HEADER_BYTES} bytes for a header."
    )
