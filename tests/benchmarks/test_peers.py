"""The peers do the same work: the plain FastAPI version works, and all peers get the same requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import numpy as np
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb

from benchmarks import contents
from benchmarks.load.orders import HttpAsk
from benchmarks.peers import servers
from benchmarks.peers.plain_fastapi_app import app_for
from benchmarks.peers.run import IDLE_STREAMS, IDLE_WARM_UP, WORKLOADS
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


@pytest.mark.parametrize("name", ["small", "large", "file"])
def test_every_peer_is_measured(name: str) -> None:
    assert all(name in asks for asks in (GATEWAY, PLAIN, KSERVE, TRITON, GRPC))


def test_the_gateway_and_plain_grpc_have_every_workload() -> None:
    for workload in WORKLOADS:
        assert workload.ask in GATEWAY
        assert workload.ask in GRPC


def test_the_numbers_are_the_same_for_every_peer() -> None:
    assert contents.json_of(input=contents.LARGE) == GATEWAY["large"].body
    assert PLAIN["large"].body == GATEWAY["large"].body
    assert KSERVE["large"] == TRITON["large"]
    assert GRPC["large"].inputs[0].raw == contents.LARGE.tobytes()


def test_the_pipeline_admits_all_idle_streams() -> None:
    """An adaptive limit would refuse most of them, because they are opened at the same time."""
    pipelines = yaml.safe_load((HERE / "gateway.yaml").read_text())["pipelines"]
    assert pipelines["bench_stream"]["limits"]["in_flight"] >= IDLE_STREAMS + IDLE_WARM_UP
