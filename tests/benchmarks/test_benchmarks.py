"""The benchmarks: the load clients count answers and stop at an unexpected one, and the peers do the same work.

Also in the micro-benchmarks. Tables and charts are from invented samples. The plain FastAPI version works, and all
peers get the same requests.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import httpx
import numpy as np
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb
from websockets.asyncio.server import ServerConnection, serve

from app.cli import main
from benchmarks import contents, steps
from benchmarks.compare import Found, Sample
from benchmarks.load.__main__ import Worker
from benchmarks.load.http import HttpClient
from benchmarks.load.orders import Drop, Flood, Hold, HttpAsk, Obedient, Relay, SocketAsk, Unary, UnexpectedAnswer
from benchmarks.micro import cases, small_request
from benchmarks.micro import peers as micro_peers
from benchmarks.micro.cpu import cpu_of
from benchmarks.micro.exchange import request as answer_of
from benchmarks.micro.gateway import served
from benchmarks.micro.run import table
from benchmarks.peers import servers
from benchmarks.peers.plain_fastapi_app import app_for
from benchmarks.peers.run import COMPARISON, IDLE_STREAMS, IDLE_WARM_UP, SMALL_32, WORKLOADS
from benchmarks.servers import HERE, load_process
from benchmarks.workers import ASK as ASK_OF_A_WORKER
from benchmarks.workers import gateway
from tests.toolkit.triton import FakeTriton, serving

ASK = HttpAsk("/", b"{}", event=b"event: output", end=b"event: done")
SOCKET = SocketAsk("/", b"{}", last=b'"event":"done"')

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def http_server(answer: Answer) -> AsyncIterator[int]:
    """Yields the port of a server for requests with the body of ``ASK``."""
    handlers: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(cast("asyncio.Task[None]", asyncio.current_task()))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n{}"):
                await answer(writer)
        writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait(handlers, timeout=5)


async def in_two_parts(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
    await writer.drain()
    await asyncio.sleep(0.001)
    writer.write(b"cd")


async def not_found(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


async def two_events(writer: asyncio.StreamWriter) -> None:
    for part in (b"HTTP/1.1 200 OK\r\n\r\nevent: out", b"put\n\nevent: output\n\n", b"event: done"):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.001)


async def test_http_client_counts_whole_answers() -> None:
    async with http_server(in_two_parts) as port:
        report = await HttpClient("127.0.0.1", port).unary([ASK] * 2, seconds=0.03)
    assert report.count == len(report.durations) >= 2
    assert report.elapsed_s >= 0.03


async def test_each_websocket_sends_its_next_message_after_the_last_event() -> None:
    async def answer(connection: ServerConnection) -> None:
        async for message in connection:
            assert message == "{}"
            for event in ("output", "done"):
                await connection.send(f'{{"event":"{event}"}}')

    async with serve(answer, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        report = await HttpClient("127.0.0.1", port).unary([SOCKET] * 2, seconds=0.03)
    assert report.count == len(report.durations) >= 2


async def test_events_are_counted_across_chunks() -> None:
    async with http_server(two_events) as port:
        assert (await Worker(HttpClient("127.0.0.1", port)).perform(Relay((ASK,), 0.001))).count == 2


async def test_a_load_process_holds_streams_until_they_are_dropped(tmp_path: Path) -> None:
    opened: list[asyncio.StreamWriter] = []

    async def begin(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        opened.append(writer)

    async with http_server(begin) as port, load_process("http", f"127.0.0.1:{port}", tmp_path) as load:
        assert (await load.perform(Hold(ASK, streams=3))).count == 3
        assert (await load.perform(Hold(ASK, streams=1))).count == 4
        assert not any(each.transport.is_closing() for each in opened)
        assert (await load.perform(Drop())).count == 0


async def test_a_load_process_raises_the_exception_of_its_load(tmp_path: Path) -> None:
    async with http_server(not_found) as port, load_process("http", f"127.0.0.1:{port}", tmp_path) as load:
        with pytest.raises(UnexpectedAnswer, match="404"):
            await load.perform(Unary((ASK,), seconds=5))


async def refused(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 60\r\nContent-Length: 0\r\n\r\n")


async def test_a_flood_sends_at_a_steady_rate() -> None:
    async with http_server(in_two_parts) as port:
        client = HttpClient("127.0.0.1", port)
        answers = await client.above_capacity(Flood(ASK, rate=200, warm_up_s=0.0, seconds=0.2))
    assert 1 < answers.asked <= 40
    assert len(answers.good_s) == answers.statuses[200] > 0


@pytest.mark.parametrize("obeys", [True, False])
async def test_an_obedient_caller_waits_for_retry_after(obeys: bool) -> None:
    order = Obedient(ASK, callers=2, pause_s=0.01, warm_up_s=0.0, seconds=0.2, obeys=obeys)
    async with http_server(refused) as port:
        answers = await HttpClient("127.0.0.1", port).above_capacity(order)
    assert answers.statuses == {429: len(answers.refused_s)}
    assert (answers.asked == 2) == obeys


async def test_two_workers_with_an_instant_engine_answer(tmp_path: Path) -> None:
    """The gateway of the workers' benchmark answers without Triton."""
    async with gateway("instant", None, tmp_path, workers="2") as peer:
        report = await peer.load.perform(Unary((ASK_OF_A_WORKER,) * 2, seconds=0.1))
    assert report.count


@pytest.mark.parametrize("kind", steps.PEERS)
def test_the_models_and_pipelines_of_steps_pass_the_check(tmp_path: Path, kind: str) -> None:
    models = steps.repository(tmp_path / "models")
    (tmp_path / "gateway.yaml").write_text(steps.pipelines(kind))
    assert main(["check", str(models), "--config", str(tmp_path / "gateway.yaml")]) == 0


GATEWAY, PLAIN, GRPC = servers.gateway_asks(), servers.plain_asks(), servers.grpc_asks()
KSERVE, TRITON = servers.kserve_asks(), servers.triton_asks()


async def unary(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
    (raw,) = request.raw_input_contents
    answer = pb.ModelInferResponse(model_name=request.model_name)
    if request.model_name == "bench_identity":
        answer.outputs.add(name="OUTPUT", datatype="FP32", shape=request.inputs[0].shape)
        answer.raw_output_contents.append(raw)
    elif request.model_name == "bench_file":
        answer.outputs.add(name="SIZE", datatype="INT32", shape=[1])
        answer.raw_output_contents.append(np.array([len(raw) - 4], np.int32).tobytes())
    else:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "EARLY_EXIT[no_text]")
    return answer


async def streamed(
    request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
) -> AsyncIterator[pb.ModelStreamInferResponse]:
    answer = pb.ModelStreamInferResponse()
    answer.infer_response.outputs.add(name="TEXT", datatype="BYTES", shape=[1])
    answer.infer_response.raw_output_contents.append(b"\x05\0\0\0word ")
    answer.infer_response.outputs.add(name="TOKEN_ID", datatype="INT32", shape=[1])
    answer.infer_response.raw_output_contents.append(b"\x07\0\0\0")
    yield answer


@asynccontextmanager
async def plain_client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving(FakeTriton(unary=unary, streamed=streamed)) as triton:
        app = app_for(triton.url)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://plain")
        async with app.router.lifespan_context(app), client:
            yield client


async def sent(client: httpx.AsyncClient, ask: HttpAsk) -> httpx.Response:
    return await client.post(ask.path, content=ask.body, headers={"Content-Type": ask.content_type})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("small", {"output": [1.5, 2.5, 3.5, 4.5]}),
        ("file", {"size": len(contents.FILE)}),
        ("early exit", {"texts": [], "early_exit": True}),
    ],
)
async def test_plain_fastapi_answers(name: str, answer: object) -> None:
    async with plain_client() as client:
        response = await sent(client, PLAIN[name])
    assert (response.status_code, response.json()) == (200, answer)


async def test_plain_fastapi_streams_events_and_a_final_event() -> None:
    ask = PLAIN["stream"]
    async with plain_client() as client:
        text = (await sent(client, ask)).content
    assert text.count(ask.event) == 1
    assert b'"token_id": [7]' in text
    assert text.endswith(ask.end + b"\n\n")


def test_every_peer_gets_the_same_requests() -> None:
    for name in ("small", "large", "file"):
        assert all(name in asks for asks in (GATEWAY, PLAIN, KSERVE, TRITON, GRPC))
    assert {workload.ask for workload in WORKLOADS} <= GATEWAY.keys() & GRPC.keys()
    assert contents.json_of(input=contents.LARGE) == GATEWAY["large"].body
    assert PLAIN["large"].body == GATEWAY["large"].body
    assert KSERVE["large"] == TRITON["large"]
    assert GRPC["large"].inputs[0].raw == contents.LARGE.tobytes()


def test_the_pipeline_admits_all_idle_streams() -> None:
    """An adaptive limit would refuse most of them, because they are opened at the same time."""
    pipelines = yaml.safe_load((HERE / "gateway.yaml").read_text())["pipelines"]
    assert pipelines["bench_stream"]["limits"]["in_flight"] >= IDLE_STREAMS + IDLE_WARM_UP


SAMPLE = Sample(1000, 2, 3, 100, 50)


def found_with(**of_gateway: float) -> Found:
    """Returns two rounds with equal figures for every peer, except the gateway at 32 connections of small requests."""
    found = Found(idle_kib={servers.GATEWAY: [20.0]})
    for workload in WORKLOADS:
        for peer in servers.PEERS:
            own = of_gateway if (workload, peer) == (SMALL_32, servers.GATEWAY) else {}
            for factor in (1, 2):
                found.add(workload, peer, replace(SAMPLE, rate=factor * SAMPLE.rate, **own))
    return found


def row_of(table: object, start: str) -> str:
    return next(line for line in str(table).splitlines() if line.startswith(f"| {start}"))


def test_a_missed_goal_is_marked() -> None:
    rate, cpu = "requests/s of small JSON, 32 connections, against plain", "CPU for a small request"
    for peer_us, end in ((60, "x **missed** | 0.5x | 0.35x |"), (50, ")x | 0.5x | 0.35x |")):
        assert row_of(COMPARISON.goals_table(found_with(peer_us=peer_us)), cpu).endswith(end)
    for factor, end in ((1.9, "x **missed** | 2x | 2.5x |"), (2.0, ")x | 2x | 2.5x |")):
        found = Found()
        found.add(SMALL_32, servers.PLAIN, SAMPLE)
        found.add(SMALL_32, servers.GATEWAY, replace(SAMPLE, rate=factor * SAMPLE.rate))
        assert row_of(COMPARISON.goals_table(found), rate).endswith(end)


def test_goals_of_a_case_share_a_row() -> None:
    found, case = Found(), steps.ALL[0]
    for peer, p50_ms in ((steps.STEPS, 3.0), (steps.SCRIPT, 2.0)):
        found.add(case, peer, replace(SAMPLE, p50_ms=p50_ms))
    table = steps.COMPARISON.goals_table(found)
    assert table.columns[1:3] == ["p50: steps / BLS script", "CPU of gateway and Triton: steps / BLS script"]
    assert table.rows == [[case.title, "1.50 (1.50-1.50)x **missed**", "1.00 (1.00-1.00)x", ""]]


def test_a_workload_has_a_row_for_each_peer_in_order() -> None:
    rows = [row[0] for row in COMPARISON.table("request", found_with()).rows]
    start = rows.index(f"**{SMALL_32.title}**") + 1
    assert rows[start : start + len(servers.PEERS)] == list(servers.PEERS)


def test_repeated_measurements_are_listed_if_there_are_any() -> None:
    found = found_with()
    assert "Repeated" not in str(COMPARISON.results(found)[-1])
    found.repeated.append((SMALL_32.title, servers.GATEWAY, "TimeoutError"))
    assert row_of(COMPARISON.results(found)[-1], SMALL_32.title).endswith("| this gateway | TimeoutError |")


def test_the_same_figures_give_the_same_charts() -> None:
    first, second = ([chart.drawn(list(servers.PEERS), found_with()) for chart in COMPARISON.charts] for _ in range(2))
    assert [each.svg for each in first] == [each.svg for each in second]
    assert all(each.svg.rstrip().endswith("</svg>") and servers.GATEWAY in each.svg for each in first)
    assert all(len(each.svg) < 40_000 for each in first)


APPLICATIONS = {
    "FastAPI with pydantic": micro_peers.fastapi_with_pydantic(),
    "FastAPI with orjson": micro_peers.fastapi_with_orjson(),
    "Starlette": micro_peers.starlette(),
    "bare ASGI": micro_peers.bare_asgi,
}


@pytest.mark.parametrize("name", APPLICATIONS)
async def test_every_application_gives_the_answer_of_the_gateway(name: str) -> None:
    async with served() as gateway:
        expected = await answer_of(gateway.app, micro_peers.PATH, small_request.BODY)
        answer = await answer_of(APPLICATIONS[name], micro_peers.PATH, small_request.BODY)
    assert expected.status == answer.status == 200
    assert json.loads(answer.answer) == json.loads(expected.answer) == {"OUTPUT": [1.5, 2.5, 3.5, 4.5]}


async def test_every_case_runs() -> None:
    async with served() as gateway:
        for case in (*cases.requests(gateway).values(), *cases.parts(gateway).values()):
            await case(1)


async def test_every_measured_case_has_a_row() -> None:
    async with served() as gateway:
        parts = cases.parts(gateway)
        name = "request_of_json"
        found = await cpu_of({name: parts[name]}, rounds=1)
    assert f"| {name} |" in str(table("Title", found))
