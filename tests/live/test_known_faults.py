"""Known faults (app/lint/known_faults.yaml) that Triton 2.51 has: provoked directly, and through the gateway."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import yaml
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.test_dead_process import processes_of
from tests.toolkit.broken_repositories import DECOUPLED, Repository
from tests.toolkit.processes import GatewayProcess, live_gateway, live_triton
from tests.toolkit.waiting import PATIENCE_S

SCRIPT = '''"""Sleeps X seconds, and returns the id of its sequence."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(each) for each in requests]

    def answer(self, request):
        time.sleep(float(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().reshape(-1)[0]))
        given = pb_utils.get_input_tensor_by_name(request, "ID")
        number = 0 if given is None or given.as_numpy().dtype == object else int(given.as_numpy().reshape(-1)[0])
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[number]], np.int64))])
'''
BURST = '''"""Sends X ten times."""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            for _ in range(10):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
QUEUE = "dynamic_batching { default_queue_policy { %s } }"
ONE = "instance_group [ { kind: KIND_CPU count: 1 } ]"
SEQUENCE = """sequence_batching {
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
}"""


def _write(folder: Path) -> None:
    repository = Repository(folder)
    rest = {
        "full": f"{ONE} {QUEUE % 'max_queue_size: 1'}",
        "late": f"{ONE} {QUEUE % 'default_timeout_microseconds: 100000 timeout_action: REJECT'}",
        "plain": ONE,
        "short": f"{ONE} {SEQUENCE % 'UINT32'}",
        "numbered": f"{ONE} {SEQUENCE % 'UINT64'}",
        "mortal": ONE,
        "named": f"{ONE} {SEQUENCE % 'STRING'}",
    }
    for name, text in rest.items():
        repository.model(name, "X:FP32:1", "Y:INT64:1", text, batch=1, script=SCRIPT)
    repository.model("burst", "X:FP32:1", "Y:FP32:1", f"{ONE} {DECOUPLED}", batch=1, script=BURST)
    repository.ensemble("flood", "X:FP32:1", "Y:INT64:1", "burst X=X > Y=m", "full X=m > Y=Y", batch=1)


triton = live_triton(_write, restarts=True, first_restart_s=0.2)
FIELDS = {"inputs": {"x": {"tensor": "X"}}, "outputs": {"y": {"tensor": "Y"}}}
gateway = live_gateway(
    yaml.safe_dump(
        {
            "pipelines": {
                "late": {"model": "late", **FIELDS, "timeout_s": 0.3},
                "flood": {"model": "flood", **FIELDS, "timeout_s": 1},
                "mortal": {"model": "mortal", **FIELDS, "sample": {"x": 0}, "readiness": "optional"},
                "plain": {"model": "plain", **FIELDS, "sample": {"x": 0}},
            },
            "oip": {"models": ["short", "numbered", "named"]},
        }
    )
)


NEVER_S = 2.5


def _request(model: str, seconds: float) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.array([seconds], np.float32).tobytes())
    return request


@asynccontextmanager
async def direct(triton: EmbeddedTriton) -> AsyncIterator[InferenceServerClient]:
    async with InferenceServerClient(triton.grpc_url) as client:
        yield client


async def call(client: InferenceServerClient, model: str, seconds: float = 0, **named: Any) -> tuple[str, float]:
    """Returns the error of Triton, or the output, and the seconds that it took."""
    given = InferInput("X", [1, 1], "FP32")
    given.set_data_from_numpy(np.array([[seconds]], np.float32))
    began = time.monotonic()
    try:
        answer = await client.infer(model, [given], **({"client_timeout": 3.0} | named))
    except InferenceServerException as exc:
        return f"{exc.status()} {exc.message()}", time.monotonic() - began
    return str(answer.as_numpy("Y").reshape(-1)[0]), time.monotonic() - began


async def ask(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Returns the status and the code, or the text of an error under ``/v2``."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as client:
        answer = await client.post(path, json=body)
    found = answer.json()
    return answer.status_code, found.get("code") or found.get("error", "")


async def step(gateway: GatewayProcess, model: str, sequence_id: int | str) -> tuple[int, str]:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [0]}
    parameters = {"sequence_id": sequence_id, "sequence_start": True}
    return await ask(gateway, f"/v2/models/{model}/infer", {"inputs": [tensor], "parameters": parameters})


async def test_8631_a_stream_behind_a_full_queue_never_ends_and_ends_here_at_its_deadline(
    triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    request = _request("flood", 0.2)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    async with grpc.aio.insecure_channel(triton.grpc_url) as channel:
        stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=NEVER_S)
        await stream.write(request)
        await stream.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [each async for each in stream if each.infer_response.parameters["triton_final_response"].bool_param]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await ask(gateway, "/v1/pipelines/flood", {"x": 0.2}) == (504, "deadline_exceeded")
    assert (await ask(gateway, "/v1/pipelines/plain", {"x": 0}))[0] == 200


async def test_7512_a_request_leaves_the_queue_late_and_here_in_time(
    triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    """The queue's timeout is 0.1 s, and the request before takes a second."""
    async with direct(triton) as client:
        answers = await asyncio.gather(*(call(client, "late", 1.0) for _ in range(2)))
    (refused,) = (each for each in answers if each[0] != "0")
    assert refused[0].endswith("Request timeout expired")
    assert refused[1] > 0.4
    began = time.monotonic()
    assert {(await ask(gateway, "/v1/pipelines/late", {"x": 1.0})) for _ in range(2)} == {(504, "deadline_exceeded")}
    assert time.monotonic() - began < 1.0


async def test_an_id_is_cut_to_32_bits_and_refused_here(triton: EmbeddedTriton, gateway: GatewayProcess) -> None:
    async with direct(triton) as client:
        assert (await call(client, "short", sequence_id=2**32 + 7, sequence_start=True))[0] == "7"
    status, error = await step(gateway, "short", 2**32 + 7)
    assert (status, "an integer of 1 to 4294967295" in error) == (400, True)


async def test_core_493_an_output_named_twice_is_accepted_and_refused_here(
    triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    async with direct(triton) as client:
        assert (await call(client, "plain", outputs=[InferRequestedOutput("Y")] * 2))[0] == "0"
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [0]}
    body = {"inputs": [tensor], "outputs": [{"name": "Y"}, {"name": "Y"}]}
    assert (await ask(gateway, "/v2/models/plain/infer", body))[0] == 400


async def test_8763_a_reserved_parameter_is_accepted_and_refused_here(
    triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    request, reserved = _request("plain", 0), "triton_enable_empty_final_response"
    request.parameters[reserved].bool_param = True
    async with grpc.aio.insecure_channel(triton.grpc_url) as channel:
        assert await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=NEVER_S)
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [0]}
    body = {"inputs": [tensor], "parameters": {reserved: True}}
    assert (await ask(gateway, "/v2/models/plain/infer", body))[0] == 400


async def test_core_461_a_model_with_a_dead_process_is_ready_and_not_here(
    triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    (process,) = processes_of(triton.pid, "mortal")
    os.kill(process, signal.SIGKILL)
    async with direct(triton) as client:
        assert "is not healthy" in (await call(client, "mortal", client_timeout=PATIENCE_S))[0]
        assert await client.is_model_ready("mortal")
    async with httpx.AsyncClient(base_url=gateway.admin_url) as client:
        while (await client.get("/health/ready")).json()["pipelines"]["mortal"] == "ready":
            await ask(gateway, "/v1/pipelines/mortal", {"x": 0})


async def test_core_425_an_id_of_another_type_kills_and_is_refused_here(
    triton: EmbeddedTriton, gateway: GatewayProcess
) -> None:
    before = triton.pid
    for model, sequence_id in (("numbered", "t" * 128), ("named", 5)):
        assert (await step(gateway, model, sequence_id))[0] == 400
    async with direct(triton) as client:
        async with asyncio.timeout(PATIENCE_S):
            while triton.pid == before:
                await call(client, "numbered", sequence_id="t" * 128, sequence_start=True)
