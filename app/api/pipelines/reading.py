"""Converts a request's body of any content type to one InferenceRequest.

The body is JSON, ``multipart/form-data`` with files as parts, or the raw bytes of the pipeline's only file, with the
parameters in the query string.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from starlette.datastructures import QueryParams

from app.api.bodies import JSON_HINT, check_no_query, is_json, media_type_of, off_loop, read_body
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.routing import check_query
from app.core.errors import FieldProblem, InvalidInput, InvalidRequest, UnsupportedMediaType
from app.core.inference import ELEMENT, InferenceRequest
from app.pipelines.pipeline import Pipeline

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
_USUAL_HEAD = re.compile(
    rb'\r\n(?i:content-disposition): form-data; name="([^"\\\r\n]*+)"(?:; filename="[^"\\\r\n]*+")?'
    rb"(?:\r\n(?i:content-type): [^\r\n]*+)?"
)
"""The head that most clients send for a part, whose group is the name. It is matched at once, which saves half of the
time for 10,000 small files."""


def parts_of(
    content_type: str, body: memoryview, lists: Collection[str] = (), max_parts: int = MAX_PARTS
) -> dict[str, bytes | list[bytes]]:
    """Parses a complete ``multipart/form-data`` body (RFC 7578) in memory. Returns field -> content.

    ``lists``: the fields that may have several parts. Their contents are lists, in the order of the parts.

    Starlette's parser is not used, because it inspects each possible start of a boundary in Python, decodes text with
    any charset that the client names, and keeps the last of two parts with the same name.

    Raises UnsupportedMediaType, InvalidRequest or InvalidInput.
    """
    _, options = _parsed(content_type.encode("latin-1"))
    if options.get(b"charset", b"").lower() not in _CHARSETS:
        raise UnsupportedMediaType("The charset of a form can only be UTF-8.", hint="Send the form without a charset.")
    parts = list(_parts(body, options.get(b"boundary", b""), max_parts))
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


def _parts(body: memoryview, boundary: bytes, max_parts: int) -> Iterator[tuple[str, bytes]]:
    """Raises InvalidRequest."""
    if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
        raise _malformed()
    delimiter = b"\r\n--" + boundary
    search = re.compile(re.escape(delimiter)).search
    start = len(delimiter) - 2 if body[: len(delimiter) - 2] == delimiter[2:] else _end_of(search(body))
    for _ in range(max_parts + 1):
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
    usual = _USUAL_HEAD.fullmatch(head)
    try:
        return (_name_in_any(head) if usual is None else usual[1]).decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _malformed() from exc


def _name_in_any(head: bytes) -> bytes:
    """The name in a head that may have other headers, parameters and escapes. Raises InvalidRequest."""
    rest_of_line, *lines = head.split(b"\r\n")
    headers = {name.strip().lower(): value for name, _, value in (line.partition(b":") for line in lines)}
    disposition, options = _parsed(headers.get(b"content-disposition", b""))
    if rest_of_line.strip() or disposition != b"form-data" or b"name" not in options:
        raise _malformed()
    return options[b"name"]


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


NO_FILE = "Send application/json: no input of this pipeline is a file."
FILE_HINT = "If an input is a file, declare `kind: image` or `kind: binary` for the input in gateway.yaml."


async def read_inference(exchange: Exchange, pipeline: Pipeline, limits: Limits) -> InferenceRequest:
    """Raises the client errors of ``app.core.errors``."""
    limits = limits.of(pipeline)
    content_type = exchange.header(b"content-type") or ""
    media_type = media_type_of(content_type)
    if is_json(media_type):
        check_no_query(exchange)
        request = await off_loop(pipeline.request_of_json, await read_body(exchange, limits))
        exchange.forget_body()  # the tensors were copied, and the answer needs memory too
        return request
    if media_type == "multipart/form-data":
        check_no_query(exchange)
        body = await read_body(exchange, limits)
        lists = [field.name for field in pipeline.inputs if field.is_list_of_files]
        max_parts = MAX_PARTS + len(lists) * pipeline.max_items
        request = await off_loop(
            lambda body: pipeline.request_of_form(parts_of(content_type, body, lists, max_parts)), body
        )
        exchange.forget_body()  # as above
        return request
    if media_type.startswith("image/") or media_type == "application/octet-stream":
        file = _file_field_of(pipeline)
        parameters = _query_of(exchange, file)
        # A stream would keep the tensor's memory until its end.
        tensor_at = ELEMENT if exchange.record.transport == "unary" else None
        return pipeline.request_of_form({**parameters, file: await read_body(exchange, limits, tensor_at=tensor_at)})
    if not any(field.is_file for field in pipeline.inputs):
        raise UnsupportedMediaType(NO_FILE, hint=JSON_HINT)
    raise UnsupportedMediaType(
        "The content type must be application/json, multipart/form-data, image/* or application/octet-stream.",
        hint=JSON_HINT,
    )


def _query_of(exchange: Exchange, file: str) -> dict[str, str]:
    """The parameters of a raw body, whose field is ``file``. Raises InvalidRequest or InvalidInput."""
    check_query(exchange.scope)
    query = QueryParams(exchange.scope["query_string"])
    check_given_once([file, *(name for name, _ in query.multi_items())])
    return dict(query)


def _file_field_of(pipeline: Pipeline) -> str:
    files = [field.name for field in pipeline.inputs if field.is_file]
    others = [field.name for field in pipeline.inputs if not field.is_file and field.is_required]
    if not files:
        raise UnsupportedMediaType(NO_FILE, hint=FILE_HINT)
    if len(files) != 1 or others:
        raise UnsupportedMediaType(
            "Raw bytes are accepted only by a pipeline whose one required input is a file.",
            hint="Send application/json or multipart/form-data instead.",
        )
    return files[0]
