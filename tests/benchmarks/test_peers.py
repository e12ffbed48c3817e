"""The peers do the same work, in the micro-benchmarks too; tables and charts from invented samples.

The plain FastAPI version works, and all peers get the same requests.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx
import numpy as np
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb

from benchmarks import contents
from benchmarks.compare import Found, Sample
from benchmarks.load.orders import HttpAsk
from benchmarks.micro import cases, small_request
from benchmarks.micro import peers as micro_peers
from benchmarks.micro.cpu import cpu_of
from benchmarks.micro.exchange import request as answer_of
from benchmarks.micro.gateway import served
from benchmarks.micro.run import table
from benchmarks.peers import servers
from benchmarks.peers.plain_fastapi_app import app_for
from benchmarks.peers.run import COMPARISON, IDLE_STREAMS, IDLE_WARM_UP, SMALL_32, WORKLOADS
from benchmarks.servers import HERE
from tests.toolkit.triton import FakeTriton, serving

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


def test_a_goal_is_missed_reached_or_exceeded() -> None:
    rate, cpu = "requests/s of small JSON, 32 connections, against plain", "CPU for a small request"
    for peer_us, verdict in ((60, "**missed**"), (50, "reached"), (35, "aim reached")):
        assert row_of(COMPARISON.goals_table(found_with(peer_us=peer_us)), cpu).endswith(
            f"| 0.5x | 0.35x | {verdict} |"
        )
    for factor, verdict in ((1.9, "**missed**"), (2.0, "reached"), (2.5, "aim reached")):
        found = Found()
        found.add(SMALL_32, servers.PLAIN, SAMPLE)
        found.add(SMALL_32, servers.GATEWAY, replace(SAMPLE, rate=factor * SAMPLE.rate))
        assert row_of(COMPARISON.goals_table(found), rate).endswith(f"| 2x | 2.5x | {verdict} |")


def test_a_workload_has_a_row_for_each_peer_in_order() -> None:
    lines = str(COMPARISON.table(SMALL_32, found_with())).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[-len(servers.PEERS) :]] == list(servers.PEERS)


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
