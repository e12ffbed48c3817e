"""Calls Triton over gRPC, with the messages of Triton's Python client but not with its classes.

The asyncio ``stream_infer`` of these classes ignores ``enable_empty_final_response`` (2.73), so the gateway would never
see the end of a stream. Each request has a gRPC stream of its own, so that the gateway can cancel one request.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

from google.protobuf.message import DecodeError
from msgspec import structs
from tritonclient.grpc import service_pb2

from app.core.aio import BackgroundTasks
from app.core.engine import NO_OBSERVER, CallObserver, Document, InferenceServer
from app.core.errors import (
    DeadlineExceeded,
    GatewayError,
    ModelError,
    ModelNotReady,
    Unavailable,
    UnknownModel,
    UpstreamError,
    UpstreamProtocol,
    UpstreamUnavailable,
)
from app.core.inference import Buffer, Deadline, InferenceRequest, InferenceResponse
from app.core.model import ModelConfig, ModelState
from app.grpc.rpc import RpcError, StreamCall, Transport
from app.shared_memory.leases import Lease, SharedMemory
from app.triton.cancellation import SELF_END_S, PacedCancels, Settling, cancel_abandoned, cancel_unanswered
from app.triton.codec import (
    RepeatedHeads,
    document_of,
    document_request,
    request_parts,
    response_of,
    stream_request_parts,
    trace_metadata,
)
from app.triton.config import model_config_of
from app.triton.grpc_errors import (
    Refusals,
    error_of_call,
    gateway_error_of,
    note_lost_sequence,
    request_too_large,
    triton_errors,
)
from app.triton.health.health import ENGINE_RETRY_S, SILENCE_S, ModelFault, TritonHealth
from app.triton.service import MAX_MESSAGE_BYTES, call_control, path_of

_CODE_WITHOUT_TRITON: dict[type[GatewayError], str] = dict.fromkeys((ModelNotReady, UpstreamUnavailable), "UNAVAILABLE")
"""The codes of errors with which the gateway itself ended a stream."""
_NO_ANSWER = {"DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"}
"""Codes that gRPC generates without Triton. Triton uses UNAVAILABLE too, which then does not count as an answer."""
_TOGETHER_S = 0.001
"""Responses of a call that arrive within this time count as one answer."""


class WatchedCall:
    """A context manager for one call. Converts every gRPC error in the block to a GatewayError.

    Reports each response, and the end of the call once, to the observer and to the health of Triton.
    """

    def __init__(
        self, request: InferenceRequest, method: str, timeout_s: float, observer: CallObserver, health: TritonHealth
    ) -> None:
        """Raises UpstreamUnavailable or ModelNotReady, and counts no call, if the model must not be called now."""
        if not request.is_probe and (refusal := health.refusal(request.model)) is not None:
            raise refusal
        self._observed = observer.started(request, method)
        self._calls = health.calls_of(request.model, method)
        self._health = health
        self._timeout_s = timeout_s
        self._began = self._since = time.monotonic()
        self._has_response = False
        self.request = self._observed.request

    def __enter__(self) -> Self:
        return self

    def response(self, response: InferenceResponse) -> None:
        now = time.monotonic()
        if not self._has_response or now - self._since >= _TOGETHER_S:
            self._has_response = True
            self._answered(now)
        self._observed.response(response)

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if exc is None:
            self.ended("OK", None)
            self._health.succeeded(self.request.model)
        elif isinstance(exc, GatewayError):
            error = self._of_engine(exc)
            self._failed(error)
            if error is not exc:
                raise error from exc
        elif isinstance(exc, RpcError | DecodeError):
            repaired = self._health.may_reload
            error = self._of_engine(error_of_call(exc, self.request.model, is_repaired=repaired))
            self._failed(error)
            raise error from exc
        else:
            is_cancelled = isinstance(exc, asyncio.CancelledError | GeneratorExit)
            self.ended("CANCELLED" if is_cancelled else "UNKNOWN", None)

    def _of_engine(self, error: GatewayError) -> GatewayError:
        """Returns the retryable error of a dead engine if the pipeline declares that the message means that."""
        model, upstream = self.request.model, error.upstream
        if type(error) is not ModelError or upstream is None:
            return error
        return engine_died(model, upstream) if self._health.is_engine_error(model, upstream.message) else error

    def _failed(self, error: GatewayError) -> None:
        if self.request.sequence is not None:
            note_lost_sequence(self.request.sequence, error)
        if error.upstream is not None:
            self._health.suspect(
                self.request.model, error.upstream.message, self._began, is_probe=self.request.is_probe
            )
        code = error.upstream.grpc_code if error.upstream else _CODE_WITHOUT_TRITON.get(type(error))
        self.ended(code or "UNKNOWN", error)

    def ended(self, code: str, error: GatewayError | None) -> None:
        self._observed.ended(code, error)
        if code == "OK" and self._has_response:
            return  # the last response was counted when it arrived
        now = time.monotonic()
        if code not in _NO_ANSWER:
            self._answered(now)
            return
        is_late = code == "DEADLINE_EXCEEDED" and not self._has_response
        if is_late or (code != "UNAVAILABLE" and now - self._since >= SILENCE_S):
            self._calls.went_unanswered(self._since, now)
        model, is_timeout = self.request.model, isinstance(error, DeadlineExceeded)
        is_explained = self._has_response or (is_timeout and self._health.may_be_busy(model, self._calls))
        if error is not None and not is_explained:
            waited_s = min(now - self._since, self._timeout_s)  # a busy gateway notices a deadline late
            self._health.failed(model, error, waited_s)

    def _answered(self, now: float) -> None:
        self._calls.answered(now - self._since, now)
        self._since = now
        if self._health.faults:  # an answer closes the breaker, also that of a canary or of an older call
            self._health.end(ModelFault.OPEN, self.request.model)


class RunningStream:
    """A stream that Triton answers now, which can be ended with an error.

    ``model``: the called model. ``began``: in monotonic seconds.
    """

    def __init__(self, model: str, call: StreamCall) -> None:
        self.model = model
        self.began = time.monotonic()
        self.longest_s = 0.0
        """The longest of the earlier silences that :meth:`sample` saw."""
        self.examined_s = 0.0
        """The silence at the last examination; 0 before the first of this silence."""
        self._call = call
        self._sampled_since: float | None = None
        self._sampled_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether the model has sent a response."""
        return self._call.arrived is not None

    @property
    def silent_s(self) -> float:
        """How long the reader has waited for the next response; 0 while it does not wait."""
        since = self._call.waits_since
        return 0.0 if since is None else time.monotonic() - since

    def sample(self) -> None:
        """Call this several times a second: it is cheaper than to measure each silence."""
        since = self._call.waits_since
        if since != self._sampled_since:
            self.longest_s = max(self.longest_s, self._sampled_s)
            self._sampled_since, self.examined_s = since, 0.0
        self._sampled_s = self.silent_s

    def end(self, error: Unavailable) -> None:
        """Ends the reader's wait with the error. A no-op while the reader does not wait."""
        self._call.interrupt(error)


CONTROL_TIMEOUT_S = 5.0
"""For health, index and configuration calls, which Triton answers within milliseconds."""
LOAD_TIMEOUT_S = 600.0
EARLY_S = 0.1
"""A model may see the deadline this much earlier: it gets whole milliseconds, and has a clock of its own."""
_INFER = path_of("ModelInfer")
_STREAM_INFER = path_of("ModelStreamInfer")
_PROVE_THE_END = {"ALREADY_EXISTS", "INVALID_ARGUMENT", "NOT_FOUND"}
"""Codes that gRPC never generates itself: Triton has ended the call."""


class TritonEngine(InferenceServer):
    """Calls one Triton. The caller must close the transport after :meth:`close`.

    Closing a stream's generator returns at once. The gRPC call is cancelled in the background.
    """

    def __init__(
        self,
        transport: Transport,
        observer: CallObserver = NO_OBSERVER,
        health: TritonHealth | None = None,
        cancels: PacedCancels | None = None,
        shared_memory: SharedMemory | None = None,
    ) -> None:
        """``shared_memory``: the shared memory for large tensors; None: all tensors are sent over the wire."""
        self._transport = transport
        self._shared_memory = shared_memory
        self._health = health or TritonHealth()
        self._observer = observer
        self._cancels = cancels or PacedCancels()
        self.streams: set[RunningStream] = set()
        """The running streams, without probes."""
        self._cancelling = BackgroundTasks()
        self._refusals = Refusals()
        self._heads = RepeatedHeads()
        self._streamed_heads = RepeatedHeads()

    async def is_live(self) -> bool:
        return await self.answers() and not self._health.is_stuck

    async def answers(self) -> bool:
        """Whether Triton reports that it is live. A live Triton may still be stuck."""
        try:
            reply = await call_control(self._transport, service_pb2.ServerLiveRequest(), CONTROL_TIMEOUT_S)
        except RpcError as exc:
            self._refusals.note(exc)
            return False
        except DecodeError:
            return False
        self._refusals.clear()
        return bool(reply.live)

    def fault(self, model: str) -> str:
        return self._health.fault(model)

    async def models(self) -> Sequence[ModelState]:
        with triton_errors():
            reply = await call_control(self._transport, service_pb2.RepositoryIndexRequest(), CONTROL_TIMEOUT_S)
        return [ModelState(model.name, model.version, model.state == "READY", model.reason) for model in reply.models]

    async def model_ready(self, model: str, version: str = "") -> bool:
        """Returns False also while the model hangs, or a Python process that it needs is dead."""
        if not self._health.is_ready(model):
            return False
        with triton_errors(model):
            reply = await call_control(
                self._transport,
                service_pb2.ModelReadyRequest(name=model, version=version),
                CONTROL_TIMEOUT_S,
            )
        return bool(reply.ready)

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        try:
            with triton_errors(model):
                reply = await call_control(
                    self._transport,
                    service_pb2.ModelConfigRequest(name=model, version=version),
                    CONTROL_TIMEOUT_S,
                )
        except GatewayError as exc:
            if not _is_about_model(exc):
                raise
            raise ModelNotReady(f"Triton has no ready model '{model}'.") from exc
        config = model_config_of(reply.config)
        self._health.learn(config)
        if self._shared_memory is not None:
            self._shared_memory.learn(config, version)
        return config

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        request = document_request(document, model, version)
        try:
            with triton_errors(model):
                return document_of(await call_control(self._transport, request, CONTROL_TIMEOUT_S))
        except GatewayError as exc:
            if not _is_about_model(exc):
                raise
            raise UnknownModel.named(model, version) from exc

    async def reload_model(self, model: str) -> None:
        """Unloads and loads the model. Models that run it are unavailable in the meantime."""
        with triton_errors(model):
            await call_control(
                self._transport,
                service_pb2.RepositoryModelUnloadRequest(model_name=model),
                CONTROL_TIMEOUT_S,
            )
            await call_control(
                self._transport,
                service_pb2.RepositoryModelLoadRequest(model_name=model),
                LOAD_TIMEOUT_S,
            )

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        timeout_s = _timeout_s(deadline, request.model)
        try:
            with WatchedCall(request, "ModelInfer", timeout_s, self._observer, self._health) as watched:
                if self._shared_memory is None:
                    response = await self._answer(watched.request, timeout_s)
                else:
                    response = await self._answer_by_shared_memory(self._shared_memory, watched.request, deadline)
                watched.response(response)
                return response
        except ModelError as exc:
            if _stopped_at(deadline, exc):
                raise DeadlineExceeded(f"Model '{request.model}' stopped at the deadline.") from exc
            raise

    async def _answer_by_shared_memory(
        self, shared_memory: SharedMemory, request: InferenceRequest, deadline: Deadline
    ) -> InferenceResponse:
        """Sends large tensors through shared memory; falls back to the wire if that is not possible."""
        lease = await shared_memory.lease(request)
        if lease is not None:
            with lease:
                lease.fill(request)
                try:
                    return await self._answer(request, _timeout_s(deadline, request.model), lease)
                except RpcError as exc:
                    if exc.code in _PROVE_THE_END:
                        lease.settle()
                    if not shared_memory.is_lost(lease, exc.details):
                        raise
        return await self._answer(request, _timeout_s(deadline, request.model))

    async def _answer(
        self, request: InferenceRequest, timeout_s: float, lease: Lease | None = None
    ) -> InferenceResponse:
        message, began = _joined(request_parts(request, lease)), time.monotonic()
        call = await self._transport.unary(_INFER, message, timeout_s, trace_metadata(request))
        del message  # frees the memory before the response arrives
        try:
            answer = await call.response()
        finally:
            if not call.done():
                settling = self._settling(request.model, began)
                self._cancelling.start(cancel_unanswered(call, self._cancels, settling))
        if lease is not None:
            lease.settle()
        response = _decoded(answer)
        return self._heads.response_of(request.model, response) if lease is None else response_of(response, lease)

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        timeout_s = _timeout_s(deadline, request.model)
        inputs, request = request.inputs, request.without_inputs()
        with WatchedCall(request, "ModelStreamInfer", timeout_s, self._observer, self._health) as watched:
            message = _joined(stream_request_parts(structs.replace(watched.request, inputs=inputs)))
            call = await self._transport.stream(_STREAM_INFER, message, timeout_s, trace_metadata(watched.request))
            del inputs, message  # frees the memory before the responses arrive
            running = RunningStream(request.model, call)
            if not request.is_probe:
                self.streams.add(running)
            is_over = False
            try:
                async for answer in call:
                    parsed = service_pb2.ModelStreamInferResponse.FromString(answer)
                    if parsed.error_message:
                        is_over = True  # whatever the final flag says
                        raise self._error_in_stream(parsed.error_message, request.model)
                    response = self._streamed_heads.response_of(request.model, parsed.infer_response, streamed=True)
                    del parsed
                    is_over = response.is_final
                    if call.is_behind:
                        response = structs.replace(response, is_behind=True)
                    watched.response(response)
                    given = [response]
                    del answer, response  # frees the memory while the response is read
                    yield given.pop()
                    if deadline.has_passed and not is_over:
                        raise RpcError("DEADLINE_EXCEEDED", "the deadline passed")
                if not is_over:
                    raise UpstreamProtocol("Triton closed the stream without marking its end.")
            finally:
                self.streams.discard(running)
                self._stop(call, running, SELF_END_S if is_over or request.ends_by_hook else 0.0)

    def _error_in_stream(self, message: str, model: str) -> GatewayError:
        return gateway_error_of(None, message, model, is_repaired=self._health.may_reload)

    def _stop(self, call: StreamCall, running: RunningStream, self_end_s: float) -> None:
        """Cancels a call that has not ended, in the background and after at least ``self_end_s`` seconds."""
        if call.done():
            call.close()
        else:
            settling = self._settling(running.model, running.began)
            self._cancelling.start(cancel_abandoned(call, self._cancels.turn() + self_end_s, settling))

    def _settling(self, model: str, began: float) -> Settling:
        return self._cancels.settling(model, began, self._health.models[model].recent_s)

    async def close(self) -> None:
        """Waits until every abandoned call has ended or is cancelled."""
        await self._cancelling.close()


def engine_died(model: str, upstream: UpstreamError) -> ModelNotReady:
    """The error of a call that found a dead engine. Only the engine of this Triton, which would say the same again."""
    error = ModelNotReady(f"The engine of model '{model}' has died.", retry_after_s=ENGINE_RETRY_S)
    error.upstream, error.was_answered = upstream, True
    return error


def _stopped_at(deadline: Deadline, error: ModelError) -> bool:
    """Whether a model that knows the deadline answered CANCELLED shortly before the call itself would have ended."""
    is_cancelled = error.upstream is not None and error.upstream.grpc_code == "CANCELLED"
    return is_cancelled and deadline.remaining_s() <= EARLY_S


def _decoded(answer: bytes) -> service_pb2.ModelInferResponse:
    return service_pb2.ModelInferResponse.FromString(answer)


def _is_about_model(error: GatewayError) -> bool:
    """Whether Triton refused a call because it does not have the model or the version."""
    return error.upstream is not None and error.upstream.grpc_code in {"NOT_FOUND", "INVALID_ARGUMENT"}


def _joined(parts: Sequence[Buffer]) -> bytes:
    """Joins the parts of a message. Raises PayloadTooLarge if Triton would not accept the message."""
    if sum(map(len, parts)) > MAX_MESSAGE_BYTES:
        raise request_too_large()
    return b"".join(parts)


def _timeout_s(deadline: Deadline, model: str) -> float:
    """Returns the time that is left. Raises DeadlineExceeded."""
    if deadline.has_passed:
        raise DeadlineExceeded(f"The deadline passed before model '{model}' was called.")
    return deadline.remaining_s()
