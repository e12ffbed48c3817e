"""A bare grpc.aio client: the generated stub and prepared requests, without a server around it. This is the floor."""

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.load.orders import Answers, Flood, GrpcAsk, Obedient, Report, UnexpectedAnswer

MAX_MESSAGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcClient:
    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(url, MAX_MESSAGE)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def connect(self) -> None:
        """Waits until the channel is connected: otherwise calls fail when a busy machine answers late."""
        await self._channel.channel_ready()

    async def unary(self, asks: Sequence[GrpcAsk], seconds: float) -> Report:
        requests = [(_request_of(ask), ask.error) for ask in asks]
        start, durations = time.perf_counter(), list[float]()

        async def calls(request: service_pb2.ModelInferRequest, error: str) -> None:
            started = time.perf_counter()
            while started < start + seconds:
                await self._call(request, error)
                now = time.perf_counter()
                durations.append(now - started)
                started = now

        await asyncio.gather(*(calls(*each) for each in requests))
        return Report(len(durations), time.perf_counter() - start, tuple(durations))

    async def _call(self, request: service_pb2.ModelInferRequest, error: str) -> None:
        try:
            answer = await self._stub.ModelInfer(request)
        except grpc.aio.AioRpcError as exc:
            if exc.code().name != error:
                raise UnexpectedAnswer(f"{exc.code().name}: {exc.details()}") from exc
        else:
            for raw in answer.raw_output_contents:
                np.frombuffer(raw, np.uint8)

    async def read_stream(self, ask: GrpcAsk, read: Callable[[int], None]) -> None:
        call = await self._opened(ask)
        await call.done_writing()
        async for message in call:
            read(bool(message.infer_response.outputs))

    async def above_capacity(self, order: Flood | Obedient) -> Answers:
        raise NotImplementedError("only HTTP servers get more load than their capacity")

    async def hold(self, ask: GrpcAsk) -> Callable[[], None]:
        return (await self._opened(ask)).cancel

    async def _opened(self, ask: GrpcAsk) -> grpc.aio.StreamStreamCall:
        call = self._stub.ModelStreamInfer()
        await call.write(_request_of(ask))
        return call


def _request_of(ask: GrpcAsk) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=ask.model)
    for each in ask.inputs:
        tensor = request.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        if each.region:
            tensor.parameters["shared_memory_region"].string_param = each.region
            tensor.parameters["shared_memory_byte_size"].int64_param = len(each.raw)
        else:
            request.raw_input_contents.append(each.raw)
    for name, value in ask.parameters:
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        else:
            request.parameters[name].int64_param = value
    return request
