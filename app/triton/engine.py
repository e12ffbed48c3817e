"""The engine over gRPC. It uses the stubs of Triton's Python client.

It does not use the classes of that client: their asyncio ``stream_infer`` ignores ``enable_empty_final_response``
(2.73), so the end of a stream would never be seen. Only a gRPC stream of its own lets the gateway cancel one request.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2, service_pb2_grpc

from app.domain.background import BackgroundTasks
from app.domain.calls import NO_OBSERVER, CallObserver, CallObservers, ObservedCall
from app.domain.deadline import FLOOR_S, Deadline
from app.domain.errors import DeadlineExceeded, GatewayError, ModelNotReady, UpstreamProtocol
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.model import ModelConfig, ModelState
from app.triton.abandoned import SELF_END_S, Messages, cancel_abandoned
from app.triton.cancels import PacedCancels
from app.triton.channel import MAX_MESSAGE_BYTES
from app.triton.codec import (
    request_message,
    response_of,
    stream_request_message,
    streamed_response_of,
    trace_metadata,
)
from app.triton.config import model_config_of
from app.triton.errors import gateway_error_of, request_too_large, triton_errors
from app.triton.health import TritonHealth

CONTROL_TIMEOUT_S = 5.0
"""For health, index and configuration calls, which Triton answers within milliseconds."""
LOAD_TIMEOUT_S = 600.0


class TritonEngine:
    """Implements :class:`app.domain.engine.Engine`. The caller closes the channel, after :meth:`close`.

    Closing a stream's generator returns at once. The gRPC call is cancelled in the background.
    """

    def __init__(
        self, channel: grpc.aio.Channel, observer: CallObserver = NO_OBSERVER, health: TritonHealth | None = None
    ) -> None:
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._health = health or TritonHealth()
        self._observer = CallObservers(observer, self._health)
        self._cancels = PacedCancels()
        self._cancelling = BackgroundTasks()

    async def is_live(self) -> bool:
        return await self.answers() and not self._health.progress.is_stuck

    async def answers(self) -> bool:
        """Whether Triton says that it is live; it may be stuck all the same."""
        try:
            reply = await self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.live)

    async def models(self) -> Sequence[ModelState]:
        with triton_errors():
            reply = await self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=CONTROL_TIMEOUT_S)
        return [ModelState(model.name, model.version, model.state == "READY", model.reason) for model in reply.models]

    async def model_ready(self, model: str, version: str = "") -> bool:
        """False also while a Python process that the model needs is dead."""
        if not self._health.stubs.is_alive(model):
            return False
        with triton_errors(model):
            reply = await self._stub.ModelReady(
                service_pb2.ModelReadyRequest(name=model, version=version), timeout=CONTROL_TIMEOUT_S
            )
        return bool(reply.ready)

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        try:
            with triton_errors(model):
                reply = await self._stub.ModelConfig(
                    service_pb2.ModelConfigRequest(name=model, version=version), timeout=CONTROL_TIMEOUT_S
                )
        except GatewayError as exc:
            if exc.upstream is None or exc.upstream.grpc_code not in {"NOT_FOUND", "INVALID_ARGUMENT"}:
                raise
            raise ModelNotReady(f"Triton has no ready model '{model}'.") from exc
        config = model_config_of(reply.config)
        self._health.stubs.learn(config)
        return config

    async def reload_model(self, model: str) -> None:
        """Unloads and loads the model. Models that run it are unavailable in the meantime."""
        with triton_errors(model):
            await self._stub.RepositoryModelUnload(
                service_pb2.RepositoryModelUnloadRequest(model_name=model), timeout=CONTROL_TIMEOUT_S
            )
            await self._stub.RepositoryModelLoad(
                service_pb2.RepositoryModelLoadRequest(model_name=model), timeout=LOAD_TIMEOUT_S
            )

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        _refuse_if_passed(deadline, request.model)
        with self._observed(request, "ModelInfer") as observed:
            request = observed.request
            message = _checked(request_message(request))
            call = self._stub.ModelInfer(message, timeout=_timeout_s(deadline), metadata=trace_metadata(request))
            try:
                await _done(call)
            finally:
                self._cancels.cancel(call)
            response = response_of(_readable(await call))
            observed.response(response)
            return response

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        _refuse_if_passed(deadline, request.model)
        with self._observed(request, "ModelStreamInfer") as observed:
            async with aclosing(self._responses(observed.request, deadline)) as responses:
                async for response in responses:
                    observed.response(response)
                    given = [response]
                    del response  # frees the memory while the response is read
                    yield given.pop()

    async def _responses(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        request_sent = _checked(stream_request_message(request))
        call = self._stub.ModelStreamInfer(timeout=_timeout_s(deadline), metadata=trace_metadata(request))
        messages = Messages(call)
        is_over = False
        try:
            await call.write(request_sent)
            del request_sent  # frees the memory before the responses arrive
            await call.done_writing()
            async for message in messages:
                if message.error_message:
                    is_over = True  # whatever the final flag says
                    raise gateway_error_of(None, message.error_message, request.model)
                given = [streamed_response_of(message.infer_response)]
                del message  # frees the memory while the response is read
                is_over = given[0].is_final
                yield given.pop()
            if not is_over:
                raise UpstreamProtocol("Triton closed the stream without marking its end.")
        finally:
            if call.done():
                messages.close()
            else:
                self_end_s = SELF_END_S if is_over or request.ends_by_hook else 0.0
                self._cancelling.start(cancel_abandoned(call, messages, self._cancels.turn() + self_end_s))

    async def close(self) -> None:
        """Waits until every abandoned stream is cancelled."""
        await self._cancelling.close()

    @contextmanager
    def _observed(self, request: InferenceRequest, method: str) -> Iterator[ObservedCall]:
        """Tells the observer how the call inside ended; every gRPC error becomes a GatewayError."""
        call = self._observer.started(request, method)
        code, error = "UNKNOWN", None
        try:
            with triton_errors(request.model):
                yield call
            code = "OK"
        except GatewayError as exc:
            code, error = (exc.upstream.grpc_code if exc.upstream else None) or "UNKNOWN", exc
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        finally:
            call.ended(code, error)


async def _done(call: grpc.aio.Call) -> None:
    """Waits for a unary call. Cancelling this wait does not cancel the call, unlike awaiting the call itself."""
    done = asyncio.Event()
    call.add_done_callback(lambda _: done.set())
    await done.wait()


def _checked(message: service_pb2.ModelInferRequest) -> service_pb2.ModelInferRequest:
    """Raises PayloadTooLarge for a message that gRPC would not carry."""
    if message.ByteSize() > MAX_MESSAGE_BYTES:
        raise request_too_large()
    return message


def _readable(message: service_pb2.ModelInferResponse | None) -> service_pb2.ModelInferResponse:
    """gRPC hands over None for a message that it cannot parse."""
    if message is None:
        raise DecodeError("gRPC could not parse the response")
    return message


def _refuse_if_passed(deadline: Deadline, model: str) -> None:
    if deadline.has_passed:
        raise DeadlineExceeded(f"The deadline passed before model '{model}' was called.")


def _timeout_s(deadline: Deadline) -> float:
    return max(deadline.remaining_s(), FLOOR_S)
