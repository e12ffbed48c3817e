"""Calls Triton over gRPC, with the messages of Triton's Python client but not with its classes.

The asyncio ``stream_infer`` of these classes ignores ``enable_empty_final_response`` (2.73), so the gateway would never
see the end of a stream. Each request has a gRPC stream of its own, so that the gateway can cancel one request.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from google.protobuf.message import DecodeError, Message
from msgspec import structs
from tritonclient.grpc import service_pb2

from app.core.aio import BackgroundTasks
from app.core.engine import CallObserver, Document, InferenceServer, ObservedCall
from app.core.errors import (
    DeadlineExceeded,
    GatewayError,
    ModelError,
    ModelNotReady,
    Unavailable,
    UnknownModel,
    UpstreamProtocol,
    UpstreamUnavailable,
)
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.model import ModelConfig, ModelState
from app.grpc.rpc import RpcError, StreamCall, Transport
from app.shared_memory.leases import Lease, SharedMemory
from app.triton.cancellation import SELF_END_S, PacedCancels
from app.triton.codec import (
    DOCUMENT_REQUESTS,
    RepeatedHeads,
    document_of,
    model_config_of,
    request_message,
    trace_metadata,
)
from app.triton.connect import call_control, path_of
from app.triton.grpc_errors import cause_of_refusal, error_of_call, gateway_error_of, note_lost_sequence
from app.triton.health.health import ENGINE_RETRY_S, SILENCE_S, ModelFault, TritonHealth

_NO_ANSWER = {"DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"}
"""Codes that gRPC generates without Triton. Triton uses UNAVAILABLE too, which then does not count as an answer."""
_TOGETHER_S = 0.001
"""Responses of a call that arrive within this time count as one answer."""
_FADING = 0.99
"""With each answer, the longest recent answer time of a model becomes this much shorter."""
_log = logging.getLogger(__name__)


class WatchedCall:
    """A context manager for one call. Converts every gRPC error in the block to a GatewayError.

    Reports each response, and the end of the call once, to the observers and to the health of Triton.
    """

    def __init__(
        self,
        request: InferenceRequest,
        method: str,
        timeout_s: float,
        observers: Sequence[CallObserver],
        health: TritonHealth,
    ) -> None:
        """Raises DeadlineExceeded, or UpstreamUnavailable or ModelNotReady if the model must not be called now.

        Such a call is not counted.
        """
        if not timeout_s:
            raise _late(request.model)
        if health.faults and not request.is_probe and (refusal := health.refusal(request.model)) is not None:
            raise refusal
        self._observed: list[ObservedCall] = []
        for observer in observers:
            self._observed.append(observer(request, method))
            request = self._observed[-1].request
        self.request = request
        self._calls = health.calls.get((request.model, method)) or health.calls_of(request.model, method)
        self._health = health
        self._timeout_s = timeout_s
        self._began = self._since = time.monotonic()
        self._has_response = False

    def __enter__(self) -> Self:
        return self

    def response(self, response: InferenceResponse) -> None:
        now = time.monotonic()
        if not self._has_response or now - self._since >= _TOGETHER_S:
            self._has_response = True
            self._answered(now)
        for each in self._observed:
            if each.response is not None:
                each.response(response)

    def _answered(self, now: float) -> None:
        """An answer closes the breaker, also that of a canary or of an older call."""
        calls, waited_s, self._since = self._calls, now - self._since, now
        calls.heard_at, calls.unanswered, calls.silent_s, calls.silent_until = now, 0, 0.0, 0.0
        model = calls.model
        model.failures = 0
        model.canary_s = 3 * waited_s if 3 * waited_s > model.canary_s else model.canary_s
        faded_s = model.recent_s * _FADING
        model.recent_s = waited_s if waited_s > faded_s else faded_s
        if self._health.faults:
            self._health.end(ModelFault.OPEN, self.request.model)

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        health, request = self._health, self.request
        if exc is None:  # the last response was counted when it arrived
            for each in self._observed:
                each.ended("OK", None)
            if health.suspects:
                engine = ModelFault.ENGINE, request.model
                if engine in health.suspects.get(request.model, ()) and health.instances(request.model) == 1:
                    del health.suspects[request.model]  # its only engine works
            return
        if isinstance(exc, RpcError | DecodeError):
            error = error_of_call(exc, request.model, is_repaired=health.may_reload)
        elif isinstance(exc, GatewayError):
            error = exc
        else:
            is_cancelled = isinstance(exc, asyncio.CancelledError | GeneratorExit)
            self.ended("CANCELLED" if is_cancelled else "UNKNOWN", None)
            return
        upstream = error.upstream
        if upstream is not None:
            dead_part = health.suspect(request.model, upstream.message, self._began, is_probe=request.is_probe)
            if type(error) is ModelError and dead_part == (ModelFault.ENGINE, request.model):
                # Only the engine of this Triton is dead, which would say the same again.
                text = ModelFault.ENGINE.refusal.format(request.model)
                error = ModelNotReady(text, retry_after_s=ENGINE_RETRY_S, was_answered=True)
                error.upstream = upstream
        if (sequence := request.sequence) is not None:
            note_lost_sequence(sequence, error)
        # The gateway itself ends streams with Unavailable.
        code = upstream.grpc_code if upstream else "UNAVAILABLE" if isinstance(error, Unavailable) else None
        self.ended(code or "UNKNOWN", error)
        if error is not exc:
            raise error from exc

    def ended(self, code: str, error: GatewayError | None) -> None:
        for each in self._observed:
            each.ended(code, error)
        now, health, calls, model = time.monotonic(), self._health, self._calls, self.request.model
        if code not in _NO_ANSWER:
            self._answered(now)
            return
        waited_s, is_late = now - self._since, code == "DEADLINE_EXCEEDED" and not self._has_response
        if is_late or (code != "UNAVAILABLE" and waited_s >= SILENCE_S):
            calls.unanswered += 1
            calls.silent_s += max(0.0, now - max(self._since, calls.silent_until))
            calls.silent_until = now
        # The breaker counts UNAVAILABLE, and a deadline that passed after the model should have answered.
        if is_timeout := isinstance(error, DeadlineExceeded):
            waited_s = min(waited_s, self._timeout_s)  # a busy gateway notices a deadline late
            counts = waited_s >= calls.model.timeout_s and not health.may_be_busy(model, calls)
        else:
            counts = isinstance(error, UpstreamUnavailable) and not error.was_answered
        if counts and not self._has_response:
            health.failed(model, is_timeout=is_timeout)


@dataclass(slots=True, eq=False)
class RunningStream:
    """A stream that Triton answers now. ``call.interrupt`` ends its reader's wait with an error."""

    model: str
    """The called model."""
    call: StreamCall
    began: float = field(default_factory=time.monotonic)
    examined_s: float = 0.0
    """The silence at the last examination; 0 before the first of this silence."""

    @property
    def silent_s(self) -> float:
        """How long the reader has waited for the next response; 0 while it does not wait."""
        since = self.call.waits_since
        return 0.0 if since is None else time.monotonic() - since


CONTROL_TIMEOUT_S = 5.0
"""For health, index and configuration calls, which Triton answers within milliseconds."""
LOAD_TIMEOUT_S = 600.0
EARLY_S = 0.1
"""A model may see the deadline this much earlier: it gets whole milliseconds, and has a clock of its own."""
_INFER = path_of("ModelInfer")
_STREAM_INFER = path_of("ModelStreamInfer")
_PROVE_THE_END = {"ALREADY_EXISTS", "INVALID_ARGUMENT", "NOT_FOUND"}
"""Codes that gRPC never generates itself: Triton has ended the call."""


def may_repeat(error: Unavailable, request: InferenceRequest) -> bool:
    """Whether a failed request may be sent again, to the same Triton or to another.

    That is so if Triton did not process it, or if it is idempotent. A request that failed because Triton is overloaded
    is not repeated, and neither is one of a sequence.
    """
    if request.sequence is not None:
        return False
    return not error.was_sent or (request.idempotent and not error.was_answered)


class TritonEngine(InferenceServer):
    """Calls one Triton. The caller must close the transport after :meth:`close`.

    Closing a stream's generator returns at once. The gRPC call is cancelled in the background.
    """

    def __init__(
        self,
        transport: Transport,
        observers: Sequence[CallObserver] = (),
        health: TritonHealth | None = None,
        cancels: PacedCancels | None = None,
        shared_memory: SharedMemory | None = None,
    ) -> None:
        """``shared_memory``: the shared memory for large tensors; None: all tensors are sent over the wire."""
        self._transport = transport
        self._shared_memory = shared_memory
        self._health = health or TritonHealth()
        self._observers = observers
        self._cancels = cancels or PacedCancels()
        self.on_repeat: Callable[[], None] | None = None
        """Called before a failed call is repeated, once; None: the caller repeats calls."""
        self.streams: set[RunningStream] = set()
        """The running streams, without probes."""
        self._cancelling = BackgroundTasks()
        self._refusal = ""
        """The cause for which Triton refused the last calls, which is logged once."""
        self._heads = RepeatedHeads()
        self._streamed_heads = RepeatedHeads()

    async def is_live(self) -> bool:
        return await self.answers() and not self._health.is_stuck

    async def answers(self) -> bool:
        """Whether Triton reports that it is live. A live Triton may still be stuck."""
        try:
            reply = await call_control(self._transport, service_pb2.ServerLiveRequest(), CONTROL_TIMEOUT_S)
        except RpcError as exc:
            cause = cause_of_refusal(exc)
            if cause and cause != self._refusal:
                self._refusal = cause
                _log.error("Triton refuses the gateway: %s", cause, extra={"error": exc.details[:300]})
            return False
        except DecodeError:
            return False
        self._refusal = ""
        return bool(reply.live)

    def fault(self, model: str) -> str:
        return next((clause for fault in self._health.faults_of(model) if (clause := fault.clause)), "")

    async def models(self) -> Sequence[ModelState]:
        reply = await self._ask(service_pb2.RepositoryIndexRequest())
        return [ModelState(model.name, model.version, model.state == "READY", model.reason) for model in reply.models]

    async def model_ready(self, model: str, version: str = "") -> bool:
        """Returns False also while the model hangs, or a process or an engine that it needs is dead."""
        if not {ModelFault.OPEN, ModelFault.STUCK}.issuperset(self._health.faults_of(model)):
            return False
        return bool((await self._ask(service_pb2.ModelReadyRequest(name=model, version=version), model)).ready)

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        unknown = ModelNotReady(f"Triton has no ready model '{model}'.")
        reply = await self._ask(service_pb2.ModelConfigRequest(name=model, version=version), model, unknown)
        config = model_config_of(reply.config)
        self._health.configs[config.name] = config
        if self._shared_memory is not None:
            self._shared_memory.learn(config, version)
        return config

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        request = DOCUMENT_REQUESTS[document](name=model, version=version)
        reply = await self._ask(request, model, UnknownModel.named(model, version))
        return document_of(reply.config if document == "config" else reply)  # type: ignore[no-any-return]

    async def reload_model(self, model: str, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Unloads and loads the model. Models that run it are unavailable in the meantime."""
        await self._ask(service_pb2.RepositoryModelUnloadRequest(model_name=model), model)
        await self._ask(service_pb2.RepositoryModelLoadRequest(model_name=model), model, timeout_s=timeout_s)

    async def _ask(
        self,
        request: Message,
        model: str = "",
        unknown: GatewayError | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> Any:
        """Calls a method other than inference. Raises ``unknown`` if Triton does not have the model or the version."""
        try:
            return await call_control(self._transport, request, timeout_s)
        except (RpcError, DecodeError) as exc:
            error = error_of_call(exc, model)
            code = None if error.upstream is None else error.upstream.grpc_code
            if unknown is not None and code in {"NOT_FOUND", "INVALID_ARGUMENT"}:
                raise unknown from error
            raise error from exc

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """Repeats a failed call once if :func:`may_repeat` allows it, but not after a refusal by an open breaker."""
        model, shared_memory, on_repeat = request.model, self._shared_memory, self.on_repeat
        while True:
            timeout_s, response = deadline.remaining_s(), None
            try:
                with WatchedCall(request, "ModelInfer", timeout_s, self._observers, self._health) as watched:
                    sent = watched.request
                    if shared_memory is not None and (lease := await shared_memory.lease(sent)) is not None:
                        with lease:
                            lease.fill(sent)
                            try:
                                response = await self._answer(sent, deadline.remaining_s(), lease)
                            except RpcError as exc:
                                if exc.code in _PROVE_THE_END:
                                    lease.is_settled = True
                                if not shared_memory.is_lost(lease, exc.details):
                                    raise
                    if response is None:  # over the wire
                        if shared_memory is not None:
                            timeout_s = deadline.remaining_s()
                        response = await self._answer(sent, timeout_s)
                    watched.response(response)
                    return response
            except ModelError as exc:
                is_cancelled = exc.upstream is not None and exc.upstream.grpc_code == "CANCELLED"
                if is_cancelled and deadline.remaining_s() <= EARLY_S:  # the model knows the deadline
                    raise DeadlineExceeded(f"Model '{model}' stopped at the deadline.") from exc
                raise
            except Unavailable as exc:
                if on_repeat is None or exc.upstream is None or not may_repeat(exc, request) or deadline.has_passed:
                    raise
            on_repeat()
            on_repeat = None

    async def _answer(
        self, request: InferenceRequest, timeout_s: float, lease: Lease | None = None
    ) -> InferenceResponse:
        if not timeout_s:  # the request waited for shared memory
            raise _late(request.model)
        message, began = request_message(request, lease), time.monotonic()
        metadata = () if request.trace is None else trace_metadata(request.trace)
        call = await self._transport.unary(_INFER, message, timeout_s, metadata)
        del message  # frees the memory before the response arrives
        try:
            answer = await call.response()
        finally:
            if not call.done():
                answers_s = self._health.models[request.model].recent_s
                self._cancelling.start(self._cancels.end_unary(call, request.model, began, answers_s))
        if lease is not None:
            lease.is_settled = True
        return self._heads.response_of(request.model, service_pb2.ModelInferResponse.FromString(answer), lease)

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        """Repeats a stream once if Triton did not process it, but not after a refusal by an open breaker."""
        model, on_repeat, health = request.model, self.on_repeat, self._health
        inputs, request = request.inputs, request.without_inputs()
        while True:
            timeout_s = deadline.remaining_s()
            try:
                with WatchedCall(request, "ModelStreamInfer", timeout_s, self._observers, health) as watched:
                    message = request_message(structs.replace(watched.request, inputs=inputs), streamed=True)
                    metadata = () if watched.request.trace is None else trace_metadata(watched.request.trace)
                    call = await self._transport.stream(_STREAM_INFER, message, timeout_s, metadata)
                    del message  # frees the memory before the responses arrive
                    running, is_over = RunningStream(model, call), False
                    if not request.is_probe:
                        self.streams.add(running)
                    try:
                        async for answer in call:
                            parsed = service_pb2.ModelStreamInferResponse.FromString(answer)
                            if parsed.error_message:
                                is_over = True  # whatever the final flag says
                                is_repaired = health.may_reload
                                raise gateway_error_of(None, parsed.error_message, model, is_repaired=is_repaired)
                            response = self._streamed_heads.response_of(model, parsed.infer_response, streamed=True)
                            del parsed
                            inputs, on_repeat, is_over = (), None, response.is_final
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
                        return
                    finally:
                        self.streams.discard(running)
                        if call.done():
                            call.close()
                        else:
                            self_end_s = SELF_END_S if is_over or request.ends_by_hook else 0.0
                            answers_s = health.models[model].recent_s
                            self._cancelling.start(
                                self._cancels.end_stream(call, model, running.began, answers_s, self_end_s)
                            )
            except Unavailable as exc:
                is_final = exc.upstream is None or exc.was_sent or request.sequence is not None
                if on_repeat is None or is_final or deadline.has_passed:
                    raise
            on_repeat()
            on_repeat = None

    async def close(self) -> None:
        """Waits until every abandoned call has ended or is cancelled."""
        await self._cancelling.close()


def _late(model: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"The deadline passed before model '{model}' was called.")
