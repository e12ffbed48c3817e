"""Serves ``/v2``: inference, Triton's generate extension, and the read-only routes.

``infer`` below ``/v2/models/{model}`` is the protocol's inference; ``generate`` and ``generate_stream`` are Triton's
extension. The read-only routes are health, metadata, configurations, statistics and the index of exposed models.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from typing import Any

import msgspec
from starlette.responses import Response

from app import __version__
from app.api.bodies import Limits, inflated, off_loop, read_body
from app.api.call import Inference, InferenceCall
from app.api.endpoint import Answering, Found
from app.api.error_table import headers_of, lenient_status_of
from app.api.exchange import Exchange, JsonResponse, allows_model, check_model
from app.api.oip.oip_bodies import (
    Generated,
    ParsedRequest,
    exited,
    generation_of,
    parse_raw_request,
    parse_request,
    send_answer,
)
from app.api.oip.signature import Signature
from app.api.streaming import Reply, StreamResponse
from app.core import errors
from app.core.answer import Answer, Values
from app.core.engine import Document
from app.core.inference import InferenceRequest, InferenceResponse
from app.core.json import json_of
from app.core.text import shown
from app.pipelines.body import LARGE_BYTES
from app.pipelines.model_errors import public_text
from app.streams.stream import Event

_NUMBER = re.compile("[0-9]{1,18}")
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


_STATUS_BY_CODE = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNIMPLEMENTED": 501}
"""gRPC code of a model's error -> Triton's HTTP status. All other codes become 400, including early exits."""


def code_of_model(error: errors.GatewayError) -> str | None:
    """The gRPC code with which the model failed or rejected its input; None for any other error."""
    is_failure = isinstance(error, errors.ModelError | errors.ContractViolation) and not isinstance(
        error, errors.UpstreamProtocol
    )
    return (error.upstream.grpc_code or "") if is_failure and error.upstream is not None else None


def error_object(error: errors.GatewayError, _request_id: str = "") -> Values:
    text = error.detail if error.hint is None else f"{error.detail} {error.hint}"
    if error.failed_step:
        text = f"Step '{error.failed_step}': {text}"
    return {"error": shown(text, 512)}


def error_response(
    error: errors.GatewayError, _request_id: str, status_by_code: Mapping[str, int] = _STATUS_BY_CODE
) -> Response:
    code = code_of_model(error)
    status = lenient_status_of(type(error)) if code is None else status_by_code.get(code, 400)
    return JsonResponse(error_object(error), status, headers_of(error))


generate_error_response = partial(error_response, status_by_code={})
"""Triton 2.51 answers 400 for every error of a model, because a stream does not transport the error's code."""


def stream_error_response(error: errors.GatewayError, request_id: str) -> Response:
    """Answers an error of the model with an event, as Triton does, and every other error with JSON."""
    if code_of_model(error) is None:
        return generate_error_response(error, request_id)
    frame = b"data: %b\n\n" % json_of(error_object(error))
    return Response(frame, 400, media_type="text/event-stream; charset=utf-8")


class OneResponse(Answer):
    """The answer of a unary request, which must have exactly one response."""

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled
        self.early_exit: str | None = None
        self.responses: list[InferenceResponse] = []

    @property
    def has_enough(self) -> bool:
        """Whether there is a second response."""
        return len(self.responses) > 1

    def add(self, response: InferenceResponse) -> None:
        """Ignores a response of a decoupled model without outputs."""
        self.early_exit = response.early_exit
        if response.outputs or not self._decoupled:
            self.responses.append(response)


class _Wanted(msgspec.Struct):
    ready: bool = False


class OipEndpoints:
    def __init__(self, inference: Inference, limits: Limits) -> None:
        self._inference = inference
        self._catalog = inference.catalog
        self._limits = limits
        self._signatures: dict[str, tuple[tuple[object, ...], Signature]] = {}

    async def infer(self, exchange: Exchange, found: Found) -> None:
        """Infer with a model.

        The Open Inference Protocol: tensors as JSON, or as binary data after the JSON.
        """
        signature, call = self._begin(exchange, found["model"], "unary")
        version, text = version_of(found), exchange.header(b"inference-header-content-length")
        declared = int(text) if text is not None and _NUMBER.fullmatch(text) else None
        body = await self._content_of(exchange, tensor_at=declared)
        json_bytes = len(body) or 1  # an empty body is not JSON
        if text is not None:
            if declared is None or declared > len(body):
                raise errors.InvalidInput(f"inference header size should be in range (0, {len(body)}).")
            json_bytes = declared
        if not json_bytes:
            parsed = parse_raw_request(body, signature, version)
        elif json_bytes < LARGE_BYTES and not signature.takes_bytes:
            parsed = parse_request(body, json_bytes, signature, version)
        else:
            parsed = await off_loop(
                lambda body: parse_request(body, json_bytes, signature, version), body, exchange, call.deadline
            )
            if json_bytes == len(body):
                exchange.body_memory = None  # the tensors were copied, and the answer needs memory too
        del body
        response = await self._only_response(exchange, call, parsed.request)
        await send_answer(exchange, parsed, response)

    async def generate(self, exchange: Exchange, found: Found) -> None:
        """Generate with a model.

        Triton's generate extension: inputs by name, and one response.
        """
        call, parsed = await self._generation(exchange, found, "unary")
        generated, response = Generated(parsed), await self._only_response(exchange, call, parsed.request)
        values = generated.add(response) or {}
        for rests in generated.finish().outputs:  # of incomplete characters
            values |= {name: values[name] + rest for name, rest in rests.items() if name in response.outputs}
        await exchange.send_json(values)

    async def generate_stream(self, exchange: Exchange, found: Found) -> Response:
        """Generate with a model as a stream.

        Triton's generate extension: inputs by name, and each response as an event.
        """
        call, parsed = await self._generation(exchange, found, "stream")
        request = parsed.request

        def problem_of(error: errors.GatewayError, _request_id: str) -> Values:
            self._complete(error, request.model)
            return error_object(error)

        call.requests, call.answer, call.problem_of = [request], Generated(parsed), problem_of
        exchange.record.triton_request_id = request.request_id  # is logged even if the request gets no slot
        with exchange.cancelled_on_disconnect():
            try:
                opened = await self._inference.open_stream(call)
            except errors.GatewayError as exc:
                self._explain(exc, request)
                raise
        return _Generation(Reply.of(*opened), self._limits)

    async def _generation(
        self, exchange: Exchange, found: Found, transport: str
    ) -> tuple[InferenceCall, ParsedRequest]:
        signature, call = self._begin(exchange, found["model"], transport)
        version, body = version_of(found), await self._content_of(exchange)
        parsed = await off_loop(lambda body: generation_of(body, signature, version), body, exchange, call.deadline)
        exchange.body_memory = None
        return call, parsed

    def _begin(self, exchange: Exchange, model: str, transport: str) -> tuple[Signature, InferenceCall]:
        """The request counts as work until its last byte is sent, under no pipeline's name.

        The signature is the same object until the model's configuration, or a pipeline over it, changes.

        Raises Forbidden, Draining, UnknownModel, ModelNotReady, and the errors of :meth:`Inference.begin`.
        """
        catalog = self._catalog
        exchange.record.transport = transport
        check_model(exchange, catalog, model)
        served = catalog.oip_models.model(model)
        layers = served.layers or (catalog.layers_of(model) if served.spec.idempotent else ())
        parts = served, catalog.oip_models.in_flight, layers
        known = self._signatures.get(model)
        if known is None or not all(map(is_, known[0], parts)):
            known = self._signatures[model] = parts, Signature(served, layers)
        signature = known[1]
        self._inference.workload.begin(exchange)
        timeout_s = signature.stream_terms.timeout_s if transport == "stream" else catalog.context.timeout_s
        return signature, self._inference.begin(exchange, signature, timeout_s)

    async def _content_of(self, exchange: Exchange, *, tensor_at: int | None = None) -> memoryview:
        """The body, inflated. Raises InvalidRequest, and the errors of ``read_body``.

        ``tensor_at``: as for ``read_body``, for a body that is not compressed.
        """
        encoding, limits = (exchange.header(b"content-encoding") or "").strip().lower(), self._limits
        if encoding in {"identity", ""}:
            return await read_body(exchange, limits, tensor_at=tensor_at)
        if encoding not in {"gzip", "deflate"}:
            hint = "Content-Encoding may be gzip or deflate."
            raise errors.UnsupportedMediaType("Unsupported compression type.", hint=hint)
        return await inflated(exchange, await read_body(exchange, limits, decodes=True), limits)

    async def _only_response(
        self, exchange: Exchange, call: InferenceCall, request: InferenceRequest
    ) -> InferenceResponse:
        """Raises GatewayError, which the caller may see."""
        call.requests, call.answer = [request], (answer := OneResponse(decoupled=call.target.config.decoupled))
        with exchange.cancelled_on_disconnect():
            try:
                await self._inference.answer(call)
            except errors.GatewayError as exc:
                self._explain(exc, request)
                exc.detail = "".join(f"{each.field}: " for each in exc.errors) + exc.detail
                raise
        if answer.early_exit is not None:
            exchange.record.exit_early(answer.early_exit)
            return exited(call.target.config, answer.early_exit, answer.responses)
        if len(answer.responses) != 1:
            raise errors.InvalidRequest(
                "generate expects model to produce exactly 1 response, and so does infer; "  # as Triton
                "call generate_stream for a model that sends any number of responses."
            )
        return answer.responses[0]

    def _explain(self, error: errors.GatewayError, request: InferenceRequest) -> None:
        """Completes the error of a call. Raises UnknownModel instead if Triton does not have the version."""
        upstream, is_absent = error.upstream, isinstance(error, errors.ModelNotReady) and not error.was_answered
        if is_absent and request.version and upstream is not None and upstream.grpc_code in {"NOT_FOUND", None}:
            raise errors.UnknownModel.named(request.model, request.version) from error
        self._complete(error, request.model)

    def _complete(self, error: errors.GatewayError, model: str) -> None:
        """Names the model in an error of it, or shows its own message if the operator allows that. Idempotent."""
        named = f"Model '{model}' failed: "
        if error.upstream is None or code_of_model(error) is None:
            return
        if self._catalog.context.exposes_oip_errors:
            error.detail, error.hint = public_text(error.upstream.message), None
        elif error.fault is not None and not error.detail.startswith(named):
            error.detail = named + error.detail[0].lower() + error.detail[1:]

    async def server(self, _exchange: Exchange, _found: Found) -> Response:
        return JsonResponse({"name": "triton-gateway", "version": __version__, "extensions": EXTENSIONS})

    async def live(self, _exchange: Exchange, _found: Found) -> Response:
        return JsonResponse({"live": True})  # Triton sends no body, but KServe's client requires what KServe sends

    async def ready(self, _exchange: Exchange, _found: Found) -> Response:
        inference = self._inference
        is_ready = inference.catalog.is_ready and not inference.workload.is_shutting_down
        return JsonResponse({"ready": is_ready}, 200 if is_ready else 400)  # as Triton

    async def model_ready(self, exchange: Exchange, found: Found) -> Response:
        model, is_ready = found["model"], False
        check_model(exchange, self._catalog, model)
        if model in self._catalog.oip_models:
            with suppress(errors.ModelNotReady):
                is_ready = await self._catalog.model_ready(model, version_of(found))
        if is_ready:
            return JsonResponse({"name": model, "ready": True})
        return JsonResponse({"error": "Model version not ready"}, 400)  # as Triton, also for an unknown model

    def document(self, document: Document) -> Answering:
        """What answers with this document of a model."""

        async def answer(exchange: Exchange, found: Found) -> Response:
            model = found["model"]
            check_model(exchange, self._catalog, model)
            return JsonResponse(await self._catalog.document(document, model, version_of(found)))

        return answer

    async def all_statistics(self, exchange: Exchange, _found: Found) -> Response:
        stats = await self._catalog.engine.document("stats", "")
        return JsonResponse({"model_stats": self._visible(exchange, stats["model_stats"])})

    async def index(self, exchange: Exchange, _found: Found) -> Response:
        body = await read_body(exchange, self._limits, decodes=True)
        try:
            wanted = msgspec.json.decode(body or b"{}", type=_Wanted)
        except (ValueError, RecursionError) as exc:
            raise errors.InvalidInput('The body must be empty or {"ready": <boolean>}.') from exc
        models = await self._catalog.model_states()
        rows = [  # without Triton's reasons, which may contain paths
            {"name": each.name, "version": each.version, "state": "READY" if each.ready else "UNAVAILABLE"}
            for each in models
            if each.ready or not wanted.ready
        ]
        return JsonResponse(self._visible(exchange, rows))

    def _visible(self, exchange: Exchange, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows of models that are exposed and that the request's key allows."""
        key, catalog = exchange.key, self._catalog
        exposed = (row for row in rows if row["name"] in catalog.oip_models)
        return [row for row in exposed if allows_model(key, catalog, row["name"])]


def version_of(found: Found) -> str:
    """The version in the path, or an empty string. Raises UnknownModel."""
    text: str = found.get("version", "")
    if text and not _NUMBER.fullmatch(text):
        raise errors.UnknownModel.named(found["model"], text)
    return str(int(text)) if text else ""


class _Generation(StreamResponse):
    """Triton's framing: events with the data of a response or an error, without ids, names and a terminal event."""

    ping = b""

    @staticmethod
    def frame_of(event: Event) -> bytes:
        return b"" if event.name == "done" else b"data: %b\n\n" % event.data
