"""Models of the real Triton whose outputs differ a little from their declaration: Triton checks no output."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource

from app.launcher.launch import EmbeddedOptions
from tests.toolkit.broken_repositories import DECOUPLED, Repository
from tests.toolkit.processes import running_gateway, running_triton

MODEL = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.is_decoupled = json.loads(args["model_config"]).get("model_transaction_policy", {}).get("decoupled")

    def execute(self, requests):
        answers = [self._answer(request) for request in requests]
        if not self.is_decoupled:
            return answers
        for request, answer in zip(requests, answers):
            sender = request.get_response_sender()
            sender.send(answer)
            sender.send(answer, flags=FINAL)

    def _answer(self, request):
        \"\"\"The numbers of X in the shape and datatype that HOW has, as Y and as texts in T.\"\"\"
        how = json.loads(pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy().flat[0])
        array = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().astype(how.get("dtype", "int64"))
        array = array[:0].reshape(how["shape"]) if 0 in how["shape"] else array.reshape(how["shape"])
        texts = np.array([str(each).encode() for each in array.flat], np.object_).reshape(array.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", array), pb_utils.Tensor("T", texts)])
"""
SENDER = MODEL.replace("if not self.is_decoupled", "if False").replace("            sender.send(answer)\n", "")
"""Not decoupled, and sends its response with a response sender: Triton marks no end of a stream."""
INPUTS, OUTPUTS = "X:INT64:1 HOW:STRING:1", "Y:INT64:1 T:STRING:1"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("nearly")
    repository = Repository(folder / "models")
    repository.model("rows", INPUTS, OUTPUTS, batch=4, script=MODEL)
    repository.model("single", INPUTS, OUTPUTS, script=MODEL)
    repository.model("sender", INPUTS, OUTPUTS, script=SENDER)
    repository.model("floats", INPUTS, "Y:FP32:1 T:STRING:1", script=MODEL)
    repository.model("streamed", INPUTS, OUTPUTS, DECOUPLED, script=MODEL)
    pipelines: dict[str, Any] = {name: {"model": name} for name in ("rows", "single", "sender", "floats")}
    pipelines["streamed"] = {"model": "streamed", "stream": True, "outputs": {"Y": {"tensor": "Y"}}}
    pipelines["sender"]["stream"] = True
    pipelines["agreed"] = {"model": "rows", "contract": {"Y": {"shape": [1], "max_items": 1, "not_growing": True}}}
    pipelines["batch"] = {"model": "rows", "batch": True}
    pipelines["exits"] = {"model": "rows", "early_exit": [{"reason": "nothing", "empty": ["Y"]}]}
    (folder / "gateway.yaml").write_text(json.dumps({"pipelines": pipelines, "oip": {"models": ["rows"]}}))
    with (
        running_triton(EmbeddedOptions(folder / "models", models_venv)) as triton,
        running_gateway(folder, triton_url=triton.grpc_url, config=str(folder / "gateway.yaml")) as served,
        httpx.Client(base_url=served.url, timeout=30) as client,
    ):
        yield client


def ask(gateway: httpx.Client, pipeline: str, *shape: int, **how: Any) -> Any:
    body = {"X": 7, "HOW": json.dumps({"shape": shape, **how})}
    return gateway.post(f"/v1/pipelines/{pipeline}", json=body).json()


@pytest.mark.parametrize("pipeline", ["rows", "single", "agreed", "exits"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_dimensions_of_size_1_may_be_missing_or_extra(
    gateway: httpx.Client, pipeline: str, shape: tuple[int, ...]
) -> None:
    assert {"Y": 7, "T": "7"}.items() <= ask(gateway, pipeline, *shape).items()


@pytest.mark.parametrize("shape", [[-1], [-1, 1], [1, -1, 1]])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_with_batch_there_is_one_value_for_each_item(gateway: httpx.Client, shape: list[int], count: int) -> None:
    """Seven items are two calls."""
    body = {"X": list(range(count)), "HOW": [json.dumps({"shape": shape})] * count}
    answer = gateway.post("/v1/pipelines/batch", json=body).json()
    assert answer == {"Y": list(range(count)), "T": [str(number) for number in range(count)]}


def test_each_response_of_a_stream(gateway: httpx.Client) -> None:
    body = {"X": 7, "HOW": json.dumps({"shape": [1, 1]})}
    with gateway.stream("POST", "/v1/pipelines/streamed/stream", json=body) as answer:
        events = [(event.event, event.json()) for event in EventSource(answer).iter_sse() if event.data]
    assert [(name, data) for name, data in events if name == "output"] == [("output", {"Y": 7})] * 2
    assert events[-1][0] == "done"


@pytest.mark.parametrize(("dtype", "value"), [("int32", 7), ("uint8", 7), ("int16", 7)])
def test_integers_of_another_size(gateway: httpx.Client, dtype: str, value: int) -> None:
    assert ask(gateway, "single", 1, dtype=dtype)["Y"] == value
    assert ask(gateway, "floats", 1, dtype=dtype)["Y"] == 7.0


def test_floats_are_not_integers(gateway: httpx.Client) -> None:
    assert ask(gateway, "floats", 1, dtype="float64")["Y"] == 7.0
    problem = ask(gateway, "single", 1, dtype="float64")
    assert (problem["code"], problem["detail"]) == ("contract_violation", "Output 'Y' is FP64; INT64 is declared.")
    assert "`.astype(np.int64)`" in problem["hint"]


def test_no_elements_need_an_early_exit(gateway: httpx.Client) -> None:
    problem = ask(gateway, "rows", 0)
    assert (problem["code"], problem["detail"]) == (
        "contract_violation",
        "Output 'Y' has shape [0]; [1,1] is declared.",
    )
    assert problem["hint"].endswith("declare an early_exit rule with empty: [Y] in gateway.yaml.")
    assert ask(gateway, "exits", 0) == {"Y": None, "T": None, "early_exit": "nothing"}


def test_v2_answers_what_triton_answers(gateway: httpx.Client) -> None:
    how = {"name": "HOW", "datatype": "BYTES", "shape": [1, 1], "data": ['{"shape": [1, 1, 1], "dtype": "int8"}']}
    body = {"inputs": [{"name": "X", "datatype": "INT64", "shape": [1, 1], "data": [7]}, how]}
    outputs = gateway.post("/v2/models/rows/infer", json=body).json()["outputs"]
    assert [(each["name"], each["datatype"], each["shape"], each["data"]) for each in outputs] == [
        ("Y", "INT8", [1, 1, 1], [7]),
        ("T", "BYTES", [1, 1, 1], ["7"]),
    ]


def test_a_response_sender_ends_the_stream_of_a_model_that_is_not_decoupled(gateway: httpx.Client) -> None:
    body = {"X": 7, "HOW": json.dumps({"shape": [1]})}
    with gateway.stream("POST", "/v1/pipelines/sender/stream", json=body) as answer:
        events = [(event.event, json.loads(event.data)) for event in EventSource(answer).iter_sse()]
    assert [name for name, _ in events] == ["output", "done"]
    assert events[0][1] == ask(gateway, "sender", 1) == {"Y": 7, "T": "7"}
