"""The engine over gRPC, on the stubs that Triton's own client carries.

Not on that client's classes: its asyncio ``stream_infer`` ignores ``enable_empty_final_response`` (2.73), so the end of
a stream would never be seen, and one gRPC stream a request is the only way to cancel one request.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from app.domain.deadline import FLOOR_S, Deadline
from app.domain.errors import DeadlineExceeded, GatewayError, ModelNotReady, UpstreamProtocol
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.model import ModelConfig, ModelState
from app.triton.cancels import PacedCancels
from app.triton.codec import (
    request_message,
    response_of,
    stream_request_message,
    streamed_response_of,
    trace_metadata,
)
from app.triton.config import model_config_of
from app.triton.errors import gateway_error_of, triton_errors
from app.triton.leaving import PATIENCE_S, Messages, hang_up

CONTROL_TIMEOUT_S = 5.0
"""For health, index and configuration calls, which Triton answers within milliseconds."""

OnCall = Callable[[str, str], None]
"""Told of every finished inference call: the model and the gRPC code."""


class TritonEngine:
    """Implements :class:`app.domain.engine.Engine`. The channel is the caller's to close, behind :meth:`close`.

    A stream that is given up ends at once for who gave it up; it is hung up in the background.
    """

    def __init__(self, channel: grpc.aio.Channel, on_call: OnCall = lambda model, code: None) -> None:
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._on_call = on_call
        self._cancels = PacedCancels()
        self._leaving: set[asyncio.Task[None]] = set()

    async def is_live(self) -> bool:
        try:
            reply = await self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.live)

    async def models(self) -> Sequence[ModelState]:
        with triton_errors():
            reply = await self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=CONTROL_TIMEOUT_S)
        return [ModelState(model.name, model.version, model.state == "READY") for model in reply.models]

    async def model_ready(self, model: str, version: str = "") -> bool:
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
        return model_config_of(reply.config)

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        _refuse_if_passed(deadline, request.model)
        with self._reported(request.model), triton_errors(request.model):
            call = self._stub.ModelInfer(
                request_message(request), timeout=_timeout_s(deadline), metadata=trace_metadata(request)
            )
            try:
                await _done(call)
            finally:
                self._cancels.cancel(call)
            return response_of(await call)

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        _refuse_if_passed(deadline, request.model)
        call = self._stub.ModelStreamInfer(timeout=_timeout_s(deadline), metadata=trace_metadata(request))
        messages = Messages(call)
        is_over = False
        try:
            with self._reported(request.model), triton_errors(request.model):
                await call.write(stream_request_message(request))
                await call.done_writing()
                async for message in messages:
                    if message.error_message:
                        is_over = True  # whatever the final flag says
                        raise gateway_error_of(None, message.error_message, request.model)
                    response = streamed_response_of(message.infer_response)
                    is_over = response.is_final
                    yield response
                    del message, response  # or they would stay until the next ones come
                if not is_over:
                    raise UpstreamProtocol("Triton closed the stream without marking its end.")
        finally:
            if call.done():
                messages.close()
            else:
                patience_s = PATIENCE_S if is_over or request.ends_by_hook else 0.0
                self._leave(hang_up(call, messages, self._cancels.turn() + patience_s))

    async def close(self) -> None:
        """Waits until every stream that was given up is hung up."""
        await asyncio.gather(*self._leaving)

    def _leave(self, hanging_up: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(hanging_up)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    @contextmanager
    def _reported(self, model: str) -> Iterator[None]:
        """Tells ``on_call`` how the call inside ended."""
        code = "OK"
        try:
            yield
        except GatewayError as exc:
            code = exc.upstream.grpc_code or "UNKNOWN" if exc.upstream else "UNKNOWN"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        finally:
            self._on_call(model, code)


async def _done(call: grpc.aio.Call) -> None:
    """Waits for a unary call; unlike awaiting the call itself, giving up does not cancel it at once."""
    done = asyncio.Event()
    call.add_done_callback(lambda _: done.set())
    await done.wait()


def _refuse_if_passed(deadline: Deadline, model: str) -> None:
    if deadline.has_passed:
        raise DeadlineExceeded(f"The deadline passed before model '{model}' was called.")


def _timeout_s(deadline: Deadline) -> float:
    return max(deadline.remaining_s(), FLOOR_S)
