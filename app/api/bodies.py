"""A request's body, whichever way it comes, -> one InferenceRequest.

JSON; ``multipart/form-data`` with files as parts; or the raw bytes of the one file that a pipeline takes, parameters in
the query string.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from mmap import mmap
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from app.api.forms import check_given_once, parts_of
from app.api.state import Limits
from app.domain.errors import (
    ClientClosedRequest,
    InvalidRequest,
    PayloadTooLarge,
    SlowRequest,
    UnsupportedMediaType,
)
from app.domain.inference import InferenceRequest
from app.pipelines.body import LARGE_BYTES
from app.pipelines.pipeline import Pipeline

JSON_HINT = "With curl, add: -H 'Content-Type: application/json'"
Read = TypeVar("Read")

_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
"""Reads large bodies, one after the other: docs/decisions/0012-bounded-bodies.md says why one."""


async def read_inference(request: Request, pipeline: Pipeline, limits: Limits) -> InferenceRequest:
    """Raises the client errors of ``app.domain.errors``."""
    media_type = _media_type_of(request)
    if _is_json(media_type):
        return await off_loop(pipeline.request_of_json, await _body_alone(request, limits))
    if media_type == "multipart/form-data":
        content_type = request.headers["content-type"]
        body = await _body_alone(request, limits)
        return await off_loop(lambda body: pipeline.request_of_form(parts_of(content_type, body)), body)
    if media_type.startswith("image/") or media_type == "application/octet-stream":
        file = _file_field_of(pipeline)
        parameters = _query_of(request, file)
        body = await read_body(request, limits)
        return await off_loop(lambda body: pipeline.request_of_form({**parameters, file: bytes(body)}), body)
    raise UnsupportedMediaType(
        "The content type is none of application/json, multipart/form-data, image/* and application/octet-stream.",
        hint=JSON_HINT,
    )


async def read_json(request: Request, limits: Limits) -> memoryview:
    """A body that can only be JSON. Raises UnsupportedMediaType, and as ``read_body``."""
    if not _is_json(_media_type_of(request)):
        raise UnsupportedMediaType("The content type is not application/json.", hint=JSON_HINT)
    return await _body_alone(request, limits)


async def read_body(request: Request, limits: Limits) -> memoryview:
    """Raises UnsupportedMediaType, PayloadTooLarge, TooManyRequests, SlowRequest or ClientClosedRequest."""
    _check_encoding(request)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_s):
            return await _collected(request, limits)
    except TimeoutError as exc:
        raise SlowRequest(f"The body did not arrive within {limits.body_s:g} s.") from exc
    except ClientDisconnect as exc:
        raise ClientClosedRequest("The client disconnected while it was sending the body.") from exc


async def off_loop(read: Callable[[memoryview], Read], body: memoryview) -> Read:
    """What ``read`` makes of the body. A large body is read in a thread, so that other requests do not wait for it."""
    if len(body) < LARGE_BYTES:
        return read(body)
    return await asyncio.get_running_loop().run_in_executor(_reader, read, body)


async def _body_alone(request: Request, limits: Limits) -> memoryview:
    """The body of a request whose fields all stand in it. Raises InvalidRequest, and as ``read_body``."""
    if request.scope["query_string"]:
        raise InvalidRequest(
            "The query string is not allowed beside a body of JSON or a form.",
            hint="Send every input and parameter in the body.",
        )
    return await read_body(request, limits)


async def _collected(request: Request, limits: Limits) -> memoryview:
    """A large body gets a mapping of its own: it takes memory only for the bytes that came, and is returned whole.

    On the heap, bodies that grow side by side leave gaps, which the process keeps.
    """
    body: bytearray | mmap = bytearray()
    size = 0
    async for chunk in request.stream():
        start, size = size, size + len(chunk)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        if size >= LARGE_BYTES and isinstance(body, bytearray):
            begun, body = body, mmap(-1, limits.max_body_bytes)
            body[:start] = begun
        body[start:size] = chunk
    return memoryview(body)[:size]


def _too_large(limits: Limits) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {limits.max_body_bytes} bytes, the limit of this gateway.")


def _check_encoding(request: Request) -> None:
    """Raises UnsupportedMediaType."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in {"identity", ""}:
        raise UnsupportedMediaType(
            "The gateway does not decode a Content-Encoding.", hint="Send the body uncompressed, without that header."
        )


def _media_type_of(request: Request) -> str:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    return header.get_content_type() if request.headers.get("content-type") else ""


def _is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


def _query_of(request: Request, file: str) -> dict[str, str]:
    """The parameters of a raw body, whose field is ``file``. Raises InvalidInput."""
    check_given_once([file, *(name for name, _ in request.query_params.multi_items())])
    return dict(request.query_params)


def _file_field_of(pipeline: Pipeline) -> str:
    files = [field.name for field in pipeline.inputs if field.is_file]
    others = [field.name for field in pipeline.inputs if not field.is_file and field.is_required]
    if len(files) != 1 or others:
        raise UnsupportedMediaType(
            "Raw bytes are accepted only by a pipeline whose one required input is a file.",
            hint="Send application/json or multipart/form-data instead.",
        )
    return files[0]
