"""A request's body, whichever way it comes, -> one InferenceRequest.

JSON; ``multipart/form-data`` with files as parts; or the raw bytes of the one file that a pipeline takes, parameters in
the query string.
"""

import asyncio
from collections.abc import AsyncGenerator
from email.message import Message

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from app.api.state import Limits
from app.domain.errors import (
    ClientClosedRequest,
    InvalidRequest,
    PayloadTooLarge,
    SlowRequest,
    UnsupportedMediaType,
)
from app.domain.inference import InferenceRequest
from app.pipelines.pipeline import Pipeline

MAX_PARTS = 64


async def read_inference(request: Request, pipeline: Pipeline, limits: Limits) -> InferenceRequest:
    """Raises the client errors of ``app.domain.errors``."""
    media_type = _media_type_of(request)
    if media_type == "application/json" or media_type.endswith("+json"):
        return pipeline.request_of_json(await read_body(request, limits))
    if media_type == "multipart/form-data":
        return pipeline.request_of_form(await _parts_of(request, await read_body(request, limits)))
    if media_type.startswith("image/") or media_type == "application/octet-stream":
        return pipeline.request_of_form(
            {**request.query_params, _file_field_of(pipeline): await read_body(request, limits)}
        )
    raise UnsupportedMediaType(
        "The content type is none of application/json, multipart/form-data, image/* and application/octet-stream.",
        hint="With curl, add: -H 'Content-Type: application/json'",
    )


async def read_body(request: Request, limits: Limits) -> bytes:
    """Raises PayloadTooLarge, SlowRequest or ClientClosedRequest."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_s):
            return await _collected(request, limits)
    except TimeoutError as exc:
        raise SlowRequest(f"The body did not arrive within {limits.body_s:g} s.") from exc
    except ClientDisconnect as exc:
        raise ClientClosedRequest("The client went away while it was sending.") from exc


async def _collected(request: Request, limits: Limits) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limits: Limits) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {limits.max_body_bytes} bytes, the limit of this gateway.")


def _media_type_of(request: Request) -> str:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    return header.get_content_type() if request.headers.get("content-type") else ""


def _file_field_of(pipeline: Pipeline) -> str:
    files = [field.name for field in pipeline.inputs if field.is_file]
    others = [field.name for field in pipeline.inputs if not field.is_file and field.is_required]
    if len(files) != 1 or others:
        raise UnsupportedMediaType(
            "Raw bytes are accepted only by a pipeline whose one required input is a file.",
            hint="Send application/json or multipart/form-data instead.",
        )
    return files[0]


async def _parts_of(request: Request, body: bytes) -> dict[str, str | bytes]:
    parser = MultiPartParser(
        request.headers, _once(body), max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=max(len(body), 1)
    )
    parser.spool_max_size = len(body) + 1
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as exc:
        raise InvalidRequest("The multipart body is malformed, or has too many parts.") from exc
    try:
        return {name: await part.read() if isinstance(part, UploadFile) else part for name, part in form.multi_items()}
    finally:
        await form.close()


async def _once(body: bytes) -> AsyncGenerator[bytes]:
    yield body
