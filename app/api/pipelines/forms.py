"""Parses a complete ``multipart/form-data`` body (RFC 7578) in memory.

Starlette's parser is not used, because it inspects each possible start of a boundary in Python, decodes text with any
charset that the client names, and keeps the last of two parts with the same name.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from app.domain.errors import FieldProblem, InvalidInput, InvalidRequest, UnsupportedMediaType

MAX_PARTS = 128
MAX_HEAD_BYTES = 1024
"""Limit for the headers of one part, and for the request's Content-Type."""
MAX_PARAMETERS = 8
"""Limit for the parameters of one header."""
MAX_BOUNDARY_BYTES = 70
"""RFC 2046, section 5.1.1."""
_CHARSETS = {b"", b"utf-8", b"utf8", b"us-ascii"}
_PARAMETER = rb';[ \t]*(?:([^ \t;="]+)=("(?:[^"\\]|\\.)*+"|[^;"]*+))?[ \t]*'
"""A parameter of a header (RFC 9110, section 5.6.6), or only its semicolon. Without backtracking, in linear time."""
_PARAMETERS = re.compile(rb"(?s)(?:%b){0,%d}+" % (_PARAMETER, MAX_PARAMETERS))
_EACH_PARAMETER = re.compile(rb"(?s)" + _PARAMETER)
_ESCAPED = re.compile(rb'\\(["\\])')


def parts_of(content_type: str, body: memoryview) -> dict[str, bytes]:
    """Returns field -> content. Raises UnsupportedMediaType, InvalidRequest or InvalidInput."""
    _, options = _parsed(content_type.encode("latin-1"))
    if options.get(b"charset", b"").lower() not in _CHARSETS:
        raise UnsupportedMediaType("The charset of a form can only be UTF-8.", hint="Send the form without a charset.")
    parts = list(_parts(body, options.get(b"boundary", b"")))
    check_given_once(name for name, _ in parts)
    return dict(parts)


def check_given_once(names: Iterable[str]) -> None:
    """Raises InvalidInput."""
    problems = [FieldProblem(name, "is given twice") for name, count in Counter(names).items() if count > 1]
    if problems:
        raise InvalidInput("A field is given twice.", errors=problems)


def _parts(body: memoryview, boundary: bytes) -> Iterator[tuple[str, bytes]]:
    """Raises InvalidRequest."""
    if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
        raise _malformed()
    delimiter = b"\r\n--" + boundary
    search = re.compile(re.escape(delimiter)).search
    start = len(delimiter) - 2 if body[: len(delimiter) - 2] == delimiter[2:] else _end_of(search(body))
    for _ in range(MAX_PARTS + 1):
        head, blank_line, _rest = bytes(body[start : start + MAX_HEAD_BYTES]).partition(b"\r\n\r\n")
        if head.startswith(b"--"):
            return
        content = start + len(head) + len(blank_line)
        start = _end_of(search(body, content))
        if not blank_line:
            break
        yield _name_in(head), bytes(body[content : start - len(delimiter)])
    raise _malformed()


def _end_of(delimiter: re.Match[bytes] | None) -> int:
    """Raises InvalidRequest if the part has no end."""
    if delimiter is None:
        raise _malformed()
    return delimiter.end()


def _name_in(head: bytes) -> str:
    """The field's name. ``head``: the rest of the boundary's line and the part's headers. Raises InvalidRequest."""
    rest_of_line, *lines = head.split(b"\r\n")
    headers = {name.strip().lower(): value for name, _, value in (line.partition(b":") for line in lines)}
    disposition, options = _parsed(headers.get(b"content-disposition", b""))
    if rest_of_line.strip() or disposition != b"form-data" or b"name" not in options:
        raise _malformed()
    try:
        return options[b"name"].decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _malformed() from exc


def _parsed(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """The value of a header in lower case, and its parameters by name. Raises InvalidRequest."""
    value, semicolon, rest = header.partition(b";")
    parameters = semicolon + rest
    if len(header) > MAX_HEAD_BYTES or not _PARAMETERS.fullmatch(parameters):
        raise _malformed()
    given = _EACH_PARAMETER.findall(parameters)
    return value.strip().lower(), {name.lower(): _unquoted(text.strip()) for name, text in given if name}


def _unquoted(value: bytes) -> bytes:
    return _ESCAPED.sub(rb"\1", value[1:-1]) if value.startswith(b'"') else value


def _malformed() -> InvalidRequest:
    return InvalidRequest(
        f"The multipart body is malformed or above a limit: {MAX_PARTS} parts, {MAX_HEAD_BYTES} bytes for the headers "
        f"of a part or for the Content-Type, {MAX_PARAMETERS} parameters for each header."
    )
