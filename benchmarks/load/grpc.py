"""A bare grpc.aio client: the generated stub and prepared requests, without a server around it. This is the floor."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.load.flood import ENDED, Ledger, paced
from benchmarks.load.orders import Answers, Flood, GrpcAsk, Report, UnexpectedAnswer

MAX_MESSAGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcClient:
    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(url, MAX_MESSAGE)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def connect(self) -> None:
        """Waits until the channel is connected, so that no call fails because a busy machine answers late."""
        await self._channel.channel_ready()

    async def unary(self, asks: Sequence[GrpcAsk], seconds: float) -> Report:
        requests = [(_request_of(ask), ask.error) for ask in asks]
        start = time.perf_counter()
        callers = (self._calls(request, error, start + seconds) for request, error in requests)
        durations = [each for found in await asyncio.gather(*callers) for each in found]
        return Report(len(durations), time.perf_counter() - start, tuple(durations))

    async def _calls(self, request: service_pb2.ModelInferRequest, error: str, ends: float) -> list[float]:
        durations = []
        started = time.perf_counter()
        while started < ends:
            await self._call(request, error)
            now = time.perf_counter()
            durations.append(now - started)
            started = now
        return durations

    async def _call(self, request: service_pb2.ModelInferRequest, error: str) -> None:
        try:
            answer = await self._stub.ModelInfer(request)
        except grpc.aio.AioRpcError as exc:
            if exc.code().name != error:
                raise UnexpectedAnswer(f"{exc.code().name}: {exc.details()}") from exc
        else:
            for raw in answer.raw_output_contents:
                np.frombuffer(raw, np.uint8)

    async def read_stream(self, ask: GrpcAsk) -> int:
        call = self._stub.ModelStreamInfer()
        await call.write(_request_of(ask))
        await call.done_writing()
        events = 0
        async for message in call:
            events += bool(message.infer_response.outputs)
        return events

    async def above_capacity(self, order: Flood) -> Answers:
        request, ledger = _request_of(cast("GrpcAsk", order.ask)), Ledger(order.warm_up_s, order.seconds)
        calls = set[asyncio.Task[None]]()

        async def call() -> None:
            start = time.perf_counter()
            try:
                await self._stub.ModelInfer(request)
            except grpc.aio.AioRpcError:
                ledger.add(ENDED, time.perf_counter() - start)
            else:
                ledger.add(200, time.perf_counter() - start)

        def ask() -> None:
            ledger.ask()
            task = asyncio.create_task(call())
            calls.add(task)
            task.add_done_callback(calls.discard)

        await paced(order, ledger.ends, ask)
        await asyncio.gather(*calls)
        return ledger.answers

    async def hold(self, ask: GrpcAsk) -> Callable[[], None]:
        call = self._stub.ModelStreamInfer()
        await call.write(_request_of(ask))
        return call.cancel


def _request_of(ask: GrpcAsk) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=ask.model)
    for each in ask.inputs:
        tensor = request.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        if each.region:
            tensor.parameters["shared_memory_region"].string_param = each.region
            tensor.parameters["shared_memory_byte_size"].int64_param = len(each.raw)
        else:
            request.raw_input_contents.append(each.raw)
    if ask.sequence_id:
        request.parameters["sequence_id"].int64_param = ask.sequence_id
    if ask.interval_ms:
        request.parameters["interval_ms"].int64_param = ask.interval_ms
    return request
