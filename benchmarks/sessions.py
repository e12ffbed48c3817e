"""`python -m benchmarks sessions`: steps of sessions over HTTP and WebSockets, compared with a bare gRPC client."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import httpx
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from benchmarks.compare import Comparison, Goal, Workload, ratio
from benchmarks.contents import SMALL, json_of
from benchmarks.load.orders import Ask, GrpcAsk, HttpAsk, SocketAsk, TensorAsk
from benchmarks.peers.servers import BARE
from benchmarks.servers import Peer, Start, Triton, direct_client, running_gateway

MODEL = "bench_session"
BODY = json_of(input=SMALL)
HTTP, SOCKET = "this gateway, HTTP", "this gateway, WebSocket"
ORDINARY = "for comparison: this gateway, a request to a model without a state"
NOTE = (
    "Steps of 4 floats to a model with a state that computes nothing. A session sends its next step when the last one "
    "was answered. The bare client is Triton's stub on grpc.aio with prepared requests of sequences. CPU: for one "
    "step; Triton's falls with the number of steps that one execution of the model has."
)
WORKLOADS = tuple(Workload(f"{n} session{'s' * (n > 1)} at a time", "step", n, unit="step") for n in (1, 32))
GOALS = tuple(
    Goal(f"steps/s, {each.title}: {name}, against the {BARE}", 0.7, 1, ratio(each, name, BARE))
    for each in WORKLOADS
    for name in (HTTP, SOCKET)
)
_sequence_ids = count(1)


@asynccontextmanager
async def _http(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    @asynccontextmanager
    async def opened(sessions: int) -> AsyncIterator[Sequence[Ask]]:
        async with httpx.AsyncClient(base_url=peer.url) as client:
            answers = [await client.post(f"/v1/pipelines/{MODEL}/sessions") for _ in range(sessions)]
            urls = [str(each.raise_for_status().json()["url"]) for each in answers]
            yield [HttpAsk(url, BODY) for url in urls]
            for url in urls:
                (await client.delete(url)).raise_for_status()

    async with running_gateway(HTTP, triton, folder, {"step": opened}) as peer:
        yield peer


@asynccontextmanager
async def _sequences(triton: Triton, sessions: int) -> AsyncIterator[Sequence[Ask]]:
    tensor = InferInput("INPUT", [1, 4], "FP32")
    tensor.set_data_from_numpy(SMALL.reshape(1, 4))
    inputs = (TensorAsk("INPUT", "FP32", (1, 4), SMALL.tobytes()),)
    ids = [next(_sequence_ids) for _ in range(sessions)]
    async with InferenceServerClient(triton.grpc_url) as client:
        for each in ids:
            await client.infer(MODEL, [tensor], sequence_id=each, sequence_start=True)
        yield [GrpcAsk(MODEL, inputs, parameters=(("sequence_id", each),)) for each in ids]
        for each in ids:
            await client.infer(MODEL, [tensor], sequence_id=each, sequence_end=True)


PEERS: dict[str, Start] = {
    BARE: lambda triton, folder: direct_client(BARE, "grpc", triton, folder, {"step": partial(_sequences, triton)}),
    HTTP: _http,
    SOCKET: partial(
        running_gateway, SOCKET, asks={"step": SocketAsk(f"/v1/pipelines/{MODEL}/session", BODY, b'"event":"done"')}
    ),
    ORDINARY: partial(running_gateway, ORDINARY, asks={"step": HttpAsk("/v1/pipelines/bench_identity", BODY)}),
}
run = Comparison(PEERS, WORKLOADS, GOALS, note=NOTE, seconds=1.0, warm_up_s=0.3).run
