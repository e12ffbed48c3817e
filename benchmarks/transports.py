"""The cost of a call to Triton with each gRPC client: CPU time of its process, and memory of an open stream.

Each measurement runs in a new process with only the client, on uvloop like the gateway. All clients create and
parse the same protobuf messages.
"""

import asyncio
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
import psutil
import uvloop
from tritonclient.grpc import service_pb2, service_pb2_grpc

from app.grpc.rpc import Transport
from app.triton.connect import open_transport
from app.triton.service import Kind, path_of
from benchmarks.grpc_server import running
from benchmarks.stage import running_triton
from benchmarks.table import Table

CALLS = 2_000
LARGE_CALLS = 40
EVENTS = 4_000
FLOATS = 2**18
"""As FP32 they are 1 MiB."""
IDLE_STREAMS = 5_000
TIMEOUT_S = 60.0


class Client(Protocol):
    async def infer(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferResponse:
        """One unary call."""

    async def stream(self, events: int) -> AsyncIterator[Any]:
        """Starts a call with this number of responses, plus the final response."""

    def parsed(self, response: Any) -> service_pb2.ModelStreamInferResponse:
        """Returns the message in an item of :meth:`stream`."""


class Stub:
    """The generated stub of grpc.aio, as other applications use it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    async def infer(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferResponse:
        return await self._stub.ModelInfer(request, timeout=TIMEOUT_S)

    async def stream(self, events: int) -> AsyncIterator[Any]:
        call = self._stub.ModelStreamInfer(timeout=TIMEOUT_S)
        await call.write(_stream_request(events))
        await call.done_writing()
        return aiter(call)

    def parsed(self, response: Any) -> service_pb2.ModelStreamInferResponse:
        return response


class OverTransport:
    """One of the gateway's transports."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def infer(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferResponse:
        call = await self._transport.unary(path_of("ModelInfer"), request.SerializeToString(), TIMEOUT_S)
        return service_pb2.ModelInferResponse.FromString(await call.response())

    async def stream(self, events: int) -> AsyncIterator[Any]:
        request = _stream_request(events).SerializeToString()
        return await self._transport.stream(path_of("ModelStreamInfer"), request, TIMEOUT_S)

    def parsed(self, response: Any) -> service_pb2.ModelStreamInferResponse:
        return service_pb2.ModelStreamInferResponse.FromString(response)


@asynccontextmanager
async def _stub(url: str) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(url) as channel:
        yield Stub(channel)


@asynccontextmanager
async def _over(kind: Kind, url: str) -> AsyncIterator[Client]:
    async with open_transport(url, kind=kind) as transport:
        yield OverTransport(transport)


CLIENTS: Mapping[str, Callable[[str], AbstractAsyncContextManager[Client]]] = {
    "grpc.aio, its stub": _stub,
    "the gateway's transport over grpcio": partial(_over, "grpcio"),
    "the gateway's own transport on asyncio": partial(_over, "asyncio"),
}


class Cost(NamedTuple):
    cpu_us: float
    """CPU time of the client's process for each call or event."""
    per_s: float


class Load(NamedTuple):
    """``total`` calls or events of ``at_once`` concurrent callers or streams."""

    send: Callable[[Client, int, int], Awaitable[None]]
    at_once: int
    total: int


async def _calls(
    request: Callable[[], service_pb2.ModelInferRequest], client: Client, at_once: int, total: int
) -> None:
    async def caller() -> None:
        for _ in range(total // at_once):
            response = await client.infer(request())
            assert len(response.raw_output_contents) == 1

    await asyncio.gather(*(caller() for _ in range(at_once)))


async def _events(client: Client, at_once: int, total: int) -> None:
    async def reader() -> None:
        outputs = 0
        async for response in await client.stream(total // at_once):
            outputs += len(client.parsed(response).infer_response.outputs)
        assert outputs == 2 * (total // at_once)

    await asyncio.gather(*(reader() for _ in range(at_once)))


Costs = Mapping[tuple[str, str], Sequence[Cost]]


async def run(rounds: int) -> list[Table]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        async with running_triton(Path(folder)) as triton:
            costs = await _interleaved(triton.grpc_url, rounds)
    async with _idle_server() as url:
        idle_kib = {name: await _in_new_process(_idle_kib, name, url) for name in CLIENTS}
    return [_table_of(costs, idle_kib)]


async def _interleaved(url: str, rounds: int) -> Costs:
    """Runs each client with each load once per round, in a random order."""
    costs: dict[tuple[str, str], list[Cost]] = {case: [] for case in itertools.product(CLIENTS, LOADS)}
    for _ in range(rounds):
        for case in random.sample(list(costs), len(costs)):
            costs[case].append(await _in_new_process(_cost, *case, url))
    return costs


async def _in_new_process(measure: Callable[..., Any], *arguments: str) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return await asyncio.get_running_loop().run_in_executor(process, _run, measure, *arguments)


def _run(measure: Callable[..., Any], *arguments: str) -> Any:
    return uvloop.run(measure(*arguments))


async def _cost(name: str, load: str, url: str) -> Cost:
    send, at_once, total = LOADS[load]
    async with CLIENTS[name](url) as client:
        await send(client, at_once, total // 4)
        cpu_s, start = time.process_time(), time.perf_counter()
        await send(client, at_once, total)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start
    return Cost(cpu_s / total * 1e6, total / wall_s)


async def _idle_kib(name: str, url: str) -> float:
    """Measures the client's resident memory for each stream that waits for its second response."""
    async with CLIENTS[name](url) as client:
        streams = [await _begun(client) for _ in range(50)]
        before = _resident_bytes()
        streams += [await _begun(client) for _ in range(IDLE_STREAMS)]
        return (_resident_bytes() - before) / IDLE_STREAMS / 1024


async def _begun(client: Client) -> AsyncIterator[Any]:
    stream = await client.stream(1)
    client.parsed(await anext(stream))
    return stream


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@asynccontextmanager
async def _idle_server() -> AsyncIterator[str]:
    """Starts a server whose streams wait after their first response. Triton would need a thread for each stream."""

    async def streamed(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield service_pb2.ModelStreamInferResponse().SerializeToString()
        await asyncio.sleep(TIMEOUT_S)

    handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(streamed)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    async with running(server) as url:
        yield url


def _few_floats() -> service_pb2.ModelInferRequest:
    """Four numbers to a model that answers with two."""
    return _request("bench_head_b", "FEATURES", "FP32", bytes(16))


def _floats_in() -> service_pb2.ModelInferRequest:
    """1 MiB to a model that answers with two numbers."""
    return _request("bench_head_b", "FEATURES", "FP32", bytes(4 * FLOATS))


def _floats_out() -> service_pb2.ModelInferRequest:
    """One number to a model that answers with 1 MiB."""
    return _request("bench_features", "FLOATS", "INT32", FLOATS.to_bytes(4, "little"))


def _stream_request(events: int) -> service_pb2.ModelInferRequest:
    """Reads responses as fast as possible."""
    request = _request("bench_stream", "COUNT", "INT32", events.to_bytes(4, "little"))
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def _request(model: str, name: str, datatype: str, raw: bytes) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=[len(raw) // 4])
    request.raw_input_contents.append(raw)
    return request


LOADS = {
    "call, 1 caller": Load(partial(_calls, _few_floats), 1, CALLS),
    "call, 32 callers": Load(partial(_calls, _few_floats), 32, CALLS),
    "1 MiB to Triton": Load(partial(_calls, _floats_in), 1, LARGE_CALLS),
    "1 MiB from Triton": Load(partial(_calls, _floats_out), 1, LARGE_CALLS),
    "event, 1 stream": Load(_events, 1, EVENTS),
    "event, 32 streams": Load(_events, 32, EVENTS),
}


def _table_of(costs: Costs, idle_kib: Mapping[str, float]) -> Table:
    rows = [[name, *(_cell(costs[name, load]) for load in LOADS), f"{idle_kib[name]:.1f}"] for name in CLIENTS]
    note = (
        "CPU time of the client for each call or event, median (lowest), and the rate per second. "
        f"KiB: resident memory for each of {IDLE_STREAMS:,} open streams. "
        "The last row is aimed at: 37 us a call at 32 callers, 30 us an event, 2.8 KiB."
    )
    return Table("gRPC clients", ["client", *LOADS, "KiB an open stream"], rows, note)


def _cell(costs: Sequence[Cost]) -> str:
    cpu = sorted(cost.cpu_us for cost in costs)
    per_s = statistics.median(cost.per_s for cost in costs)
    return f"{statistics.median(cpu):.0f} us ({cpu[0]:.0f}), {per_s:,.0f}/s"
