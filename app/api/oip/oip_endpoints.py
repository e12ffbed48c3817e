"""Serves ``/v2``: inference, Triton's generate extension, and the read-only routes.

``infer`` below ``/v2/models/{model}`` is the protocol's inference; ``generate`` and ``generate_stream`` are Triton's
extension. The read-only routes are health, metadata, configurations, statistics and the index of exposed models.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from app import __version__
from app.api.access import allows_model, check_model
from app.api.bodies import inflated, off_loop, receive_body
from app.api.call import Inference
from app.api.disconnect import CancelledOnDisconnect
from app.api.endpoint import Answering, Found
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.oip.generate import (
    Generated,
    error_object,
    generation_of,
    values_of,
)
from app.api.oip.infer import ParsedRequest, parse_raw_request, parse_request, send_answer
from app.api.oip.model_calls import ModelCalls
from app.api.oip.signature import Signature
from app.api.responses import JsonResponse, send_json
from app.api.streaming import StreamResponse
from app.core.answer import Values
from app.core.engine import Document
from app.core.errors import GatewayError, InvalidInput, ModelNotReady, UnknownModel, UnsupportedMediaType
from app.core.inference import Deadline
from app.pipelines.body import LARGE_BYTES
from app.streams.events import Event


class _Digits(StringConvertor):
    """``{version:int}`` in a path stays a text: Python converts no number of thousands of digits."""

    regex = "[0-9]+"


register_url_convertor("int", _Digits())
_ENCODINGS = {"gzip", "deflate"}
_LENGTH = b"inference-header-content-length"
_MAX_DIGITS = 18


async def read_request(
    exchange: Exchange, signature: Signature, version: str, limits: Limits, deadline: Deadline
) -> ParsedRequest:
    """Reads a request's body, inflates it if it is compressed, and finds the length of its JSON.

    Raises the client errors of ``app.core.errors``.
    """
    body = await read_content(exchange, limits, tensor_at=_declared(exchange))
    json_bytes = _json_bytes_of(exchange, len(body))
    if json_bytes == 0:
        return parse_raw_request(body, signature, version)
    if json_bytes < LARGE_BYTES and not signature.takes_bytes:
        return parse_request(body, json_bytes, signature, version)
    parsed = await off_loop(lambda body: parse_request(body, json_bytes, signature, version), body, exchange, deadline)
    if json_bytes == len(body):
        exchange.forget_body()  # the tensors were copied, and the answer needs memory too
    return parsed


async def read_content(exchange: Exchange, limits: Limits, *, tensor_at: int | None = None) -> memoryview:
    """Returns the inflated body. Raises UnsupportedMediaType, InvalidRequest, and the errors of ``receive_body``.

    ``tensor_at``: as for ``receive_body``, for a body that is not compressed.
    """
    encoding = (exchange.header(b"content-encoding") or "identity").strip().lower()
    if encoding in {"identity", ""}:
        return await receive_body(exchange, limits, tensor_at=tensor_at)
    if encoding not in _ENCODINGS:
        raise UnsupportedMediaType("Unsupported compression type.", hint="Content-Encoding may be gzip or deflate.")
    return await inflated(exchange, await receive_body(exchange, limits), limits)


def _json_bytes_of(exchange: Exchange, size: int) -> int:
    """The length of the JSON in bytes; 0 if the body is raw data for the model's only input. Raises InvalidInput."""
    if exchange.header(_LENGTH) is None:
        return size or 1  # an empty body is not JSON
    declared = _declared(exchange)
    if declared is None or declared > size:
        raise InvalidInput(f"inference header size should be in range (0, {size}).")
    return declared


def _declared(exchange: Exchange) -> int | None:
    """``Inference-Header-Content-Length``; None if it is missing or not a valid length."""
    text = exchange.header(_LENGTH) or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


EXTENSIONS = [
    "classification",
    "model_repository",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "sequence",
    "schedule_policy",
    "statistics",
    "generate",
]


class _Wanted(msgspec.Struct):
    ready: bool = False


class OipEndpoints:
    def __init__(self, inference: Inference, limits: Limits) -> None:
        self._inference = inference
        self._calls = ModelCalls(inference)
        self._limits = limits

    async def infer(self, exchange: Exchange, found: Found) -> None:
        """Infer with a model.

        The Open Inference Protocol: tensors as JSON, or as binary data after the JSON.
        """
        signature, call = self._calls.begin(exchange, found["model"], "unary")
        parsed = await read_request(exchange, signature, version_of(found), self._limits, call.deadline)
        with CancelledOnDisconnect(exchange):
            response = await self._calls.answer(call, parsed.inference)
        await send_answer(exchange, parsed, response)

    async def generate(self, exchange: Exchange, found: Found) -> None:
        """Generate with a model.

        Triton's generate extension: inputs by name, and one response.
        """
        signature, call = self._calls.begin(exchange, found["model"], "unary")
        parsed = await self._read(exchange, found, signature, call.deadline)
        with CancelledOnDisconnect(exchange):
            response = await self._calls.answer(call, parsed.inference)
        await send_json(exchange, values_of(parsed, response))

    async def generate_stream(self, exchange: Exchange, found: Found) -> Response:
        """Generate with a model as a stream.

        Triton's generate extension: inputs by name, and each response as an event.
        """
        calls = self._calls
        signature, call = calls.begin(exchange, found["model"], "stream")
        parsed = await self._read(exchange, found, signature, call.deadline)

        def problem_of(error: GatewayError, _request_id: str) -> Values:
            calls.complete(error, signature.config.name)
            return error_object(error)

        request = parsed.inference
        call.requests, call.answer, call.problem_of = [request], Generated(parsed), problem_of
        exchange.record.triton_request_id = request.request_id  # is logged even if the request gets no slot
        with CancelledOnDisconnect(exchange):
            try:
                stream, opening = await self._inference.open_stream(call)
            except GatewayError as exc:
                calls.explain(exc, request)
                raise
        return _Generation.of(stream, opening, self._limits)

    async def _read(self, exchange: Exchange, found: Found, signature: Signature, deadline: Deadline) -> ParsedRequest:
        version = version_of(found)
        body = await read_content(exchange, self._limits)
        parsed = await off_loop(lambda body: generation_of(body, signature, version), body, exchange, deadline)
        exchange.forget_body()
        return parsed

    async def server(self, _exchange: Exchange, _found: Found) -> Response:
        return JsonResponse({"name": "triton-gateway", "version": __version__, "extensions": EXTENSIONS})

    async def live(self, _exchange: Exchange, _found: Found) -> Response:
        return JsonResponse({"live": True})  # Triton sends no body, but KServe's client requires what KServe sends

    async def ready(self, _exchange: Exchange, _found: Found) -> Response:
        inference = self._inference
        is_ready = inference.catalog.is_ready and not inference.workload.is_shutting_down
        return JsonResponse({"ready": is_ready}, 200 if is_ready else 400)  # as Triton

    async def model_ready(self, exchange: Exchange, found: Found) -> Response:
        model = found["model"]
        check_model(exchange, self._inference.catalog, model)
        is_exposed = model in self._inference.catalog.oip_models
        if is_exposed and await self._is_ready(model, version_of(found)):
            return JsonResponse({"name": model, "ready": True})
        return JsonResponse({"error": "Model version not ready"}, 400)  # as Triton, also for an unknown model

    async def _is_ready(self, model: str, version: str) -> bool:
        try:
            return await self._inference.catalog.engine.model_ready(model, version)
        except ModelNotReady:
            return False

    def document(self, document: Document) -> Answering:
        """What answers with this document of a model."""

        async def answer(exchange: Exchange, found: Found) -> Response:
            model = found["model"]
            check_model(exchange, self._inference.catalog, model)
            if model not in self._inference.catalog.oip_models:
                raise UnknownModel.named(model)
            return JsonResponse(await self._inference.catalog.engine.document(document, model, version_of(found)))

        return answer

    async def all_statistics(self, exchange: Exchange, _found: Found) -> Response:
        stats = await self._inference.catalog.engine.document("stats", "")
        return JsonResponse({"model_stats": self._visible(exchange, stats["model_stats"])})

    async def index(self, exchange: Exchange, _found: Found) -> Response:
        wanted = _wanted_of(await receive_body(exchange, self._limits))
        models = await self._inference.catalog.engine.models()
        rows = [  # without Triton's reasons, which may contain paths
            {"name": each.name, "version": each.version, "state": "READY" if each.ready else "UNAVAILABLE"}
            for each in models
            if each.ready or not wanted.ready
        ]
        return JsonResponse(self._visible(exchange, rows))

    def _visible(self, exchange: Exchange, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of models that are exposed, and that the key of the request allows."""
        key, catalog = exchange.key, self._inference.catalog
        exposed = (row for row in rows if row["name"] in catalog.oip_models)
        return [row for row in exposed if allows_model(key, catalog, row["name"])]


def version_of(found: Found) -> str:
    """The version in the path, or an empty string. Raises UnknownModel."""
    text: str = found.get("version", "")
    if len(text) > _MAX_DIGITS:
        raise UnknownModel.named(found["model"], text)
    return str(int(text)) if text else ""


def _wanted_of(body: memoryview) -> _Wanted:
    """Raises InvalidInput."""
    try:
        return msgspec.json.decode(body, type=_Wanted) if body else _Wanted()
    except (ValueError, RecursionError) as exc:
        raise InvalidInput('The body must be empty or {"ready": <boolean>}.') from exc


class _Generation(StreamResponse):
    """Triton's framing: events with the data of a response or an error, without ids, names and a terminal event."""

    ping = b""

    @staticmethod
    def frame_of(event: Event) -> bytes:
        return b"" if event.name == "done" else b"data: %b\n\n" % event.data
