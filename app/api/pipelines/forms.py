"""Parses ``multipart/form-data`` (RFC 7578), also of a body whose rest has not arrived yet.

Starlette's parser is not used, because it inspects each possible start of a boundary in Python, decodes text with any
charset that the client names, and keeps the last of two parts with the same name.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from app.core.errors import FieldProblem, InvalidInput, InvalidRequest, UnsupportedMediaType
from app.pipelines.body import FilePart

MAX_PARTS = 128
MAX_HEAD_BYTES = 1024
"""Limit for the headers of one part, and for the request's Content-Type."""
MAX_PARAMETERS = 8
"""Limit for the parameters of one header."""
WINDOW_BYTES = 64 * 1024
MAX_BOUNDARY_BYTES = 70
"""RFC 2046, section 5.1.1."""
_CHARSETS = {b"", b"utf-8", b"utf8", b"us-ascii"}
_PARAMETER = rb';[ \t]*(?:([^ \t;="]+)=("(?:[^"\\]|\\.)*+"|[^;"]*+))?[ \t]*'
"""A parameter of a header (RFC 9110, section 5.6.6), or only its semicolon. Without backtracking, in linear time."""
_PARAMETERS = re.compile(rb"(?s)(?:%b){0,%d}+" % (_PARAMETER, MAX_PARAMETERS))
_EACH_PARAMETER = re.compile(rb"(?s)" + _PARAMETER)
_ESCAPED = re.compile(rb'\\(["\\])')
_USUAL_HEAD = re.compile(
    rb'\r\n(?i:content-disposition): form-data; name="([^"\\\r\n]*+)"(; filename="[^"\\\r\n]*+")?'
    rb"(?:\r\n(?i:content-type): [^\r\n]*+)?\r\n\r\n"
)
"""The head that most clients send for a part, with the empty line after it. The groups are the name and the file name.
It is matched where it stands, which saves two thirds of the time for 10,000 small files."""


Part = tuple[str, bytes]
"""The name and the content, a FilePart if the part has a file name."""


def parts_of(
    content_type: str, body: memoryview, lists: Collection[str] = (), max_parts: int = MAX_PARTS
) -> dict[str, bytes | list[bytes]]:
    """Parses a complete body in memory. Returns field -> content.

    ``lists``: the fields that may have several parts. Their contents are lists, in the order of the parts.

    Raises UnsupportedMediaType, InvalidRequest or InvalidInput.
    """
    parser = FormParser(content_type, max_parts)
    parts = list(parser.parts_in(body))
    parser.check_ended()
    check_given_once(name for name, _ in parts if name not in lists)
    contents: dict[str, bytes | list[bytes]] = {name: content for name, content in parts if name not in lists}
    for name in lists:
        if files := [content for each, content in parts if each == name]:
            contents[name] = files
    return contents


def check_given_once(names: Iterable[str]) -> None:
    """Raises InvalidInput."""
    problems = [FieldProblem(name, "is given twice") for name, count in Counter(names).items() if count > 1]
    if problems:
        raise InvalidInput("A field is given twice.", errors=problems)


class FormParser:
    """Finds the parts of a form in its body, which may still be arriving."""

    def __init__(self, content_type: str, max_parts: int) -> None:
        """Raises UnsupportedMediaType or InvalidRequest."""
        _, options = _parsed(content_type.encode("latin-1"))
        if options.get(b"charset", b"").lower() not in _CHARSETS:
            hint = "Send the form without a charset."
            raise UnsupportedMediaType("The charset of a form can only be UTF-8.", hint=hint)
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise _malformed()
        self._delimiter = b"\r\n--" + boundary
        self._max_parts = max_parts
        self._has_ended = False
        self._head: int | None = None
        """Where the head of the next part begins; None before the first delimiter."""
        self._name = ""
        self._type: type[bytes] = bytes
        """Of the content of the next part."""
        self._content: int | None = None
        """Where the content of the next part begins; None before its head was read."""
        self._searched = 0
        """Where the search for the next delimiter goes on."""
        self._window = b""
        """A copy of a piece of the body, in which the search is ten times as fast as in a memoryview."""
        self._window_at = 0

    def parts_in(self, body: memoryview) -> Iterator[Part]:
        """Yields the complete parts that follow those of the last call.

        ``body``: all of it that has arrived, at the same place as before or at another. Raises InvalidRequest.
        """
        while self._knows_head(body) and (end := self._find(body)) >= 0:
            content = self._type(body[self._content : end])
            self._head, self._content = end + len(self._delimiter), None
            yield self._name, content

    def check_ended(self) -> None:
        """Call it after the parts of the complete body. Raises InvalidRequest."""
        if not self._has_ended:
            raise _malformed()

    def _knows_head(self, body: memoryview) -> bool:
        """Whether there is a next part, whose head has arrived."""
        if self._content is not None:
            return True
        if self._has_ended or not self._has_begun(body):
            return False
        assert self._head is not None
        start = self._head - self._window_at
        if usual := _USUAL_HEAD.match(self._window, start, start + MAX_HEAD_BYTES):
            self._begin_part(usual[1], self._window_at + usual.end(), is_file=usual[2] is not None)
            return True
        head, blank_line, _rest = bytes(body[self._head : self._head + MAX_HEAD_BYTES]).partition(b"\r\n\r\n")
        if head.startswith(b"--"):
            self._has_ended = True
        elif blank_line:
            name, is_file = _name_in(head)
            self._begin_part(name, self._head + len(head) + len(blank_line), is_file=is_file)
        elif len(head) == MAX_HEAD_BYTES:
            raise _malformed()
        return self._content is not None

    def _begin_part(self, name: bytes, content: int, *, is_file: bool) -> None:
        """``content``: where it begins. Raises InvalidRequest."""
        if not self._max_parts:
            raise _malformed()
        try:
            self._name = name.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise _malformed() from exc
        self._type = FilePart if is_file else bytes
        self._max_parts -= 1
        self._content = self._searched = content

    def _has_begun(self, body: memoryview) -> bool:
        """Whether the first delimiter has arrived. A form may begin with it, without the end of a line."""
        if self._head is None:
            first = self._delimiter[2:]
            if body[: len(first)] == first:
                self._head = len(first)
            elif len(body) >= len(first) and (found := self._find(body)) >= 0:
                self._head = found + len(self._delimiter)
        return self._head is not None

    def _find(self, body: memoryview) -> int:
        """Where the next delimiter begins; -1 if it has not arrived."""
        while (found := self._window.find(self._delimiter, self._searched - self._window_at)) < 0:
            window_end = self._window_at + len(self._window)
            self._searched = max(self._searched, window_end - len(self._delimiter) + 1)
            if window_end >= len(body):
                return -1
            self._window_at = self._searched
            self._window = bytes(body[self._searched : self._searched + WINDOW_BYTES])
        return self._window_at + found


def _name_in(head: bytes) -> tuple[bytes, bool]:
    """The field's name, and whether there is a file name. Raises InvalidRequest.

    ``head``: the rest of the boundary's line and the part's headers.
    """
    rest_of_line, *lines = head.split(b"\r\n")
    headers = {name.strip().lower(): value for name, _, value in (line.partition(b":") for line in lines)}
    disposition, options = _parsed(headers.get(b"content-disposition", b""))
    if rest_of_line.strip() or disposition != b"form-data" or b"name" not in options:
        raise _malformed()
    return options[b"name"], b"filename" in options or b"filename*" in options


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
        f"The multipart body is malformed or above a limit: {MAX_PARTS} parts besides lists of files, {MAX_HEAD_BYTES} "
        f"bytes for the headers of a part or for the Content-Type, {MAX_PARAMETERS} parameters for each header."
    )
