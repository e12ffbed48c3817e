"""The gateway explains unclear errors of the real Triton about chains of models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.launcher.launch import EmbeddedOptions
from tests.live.conftest import running_gateway, running_triton
from tests.toolkit.broken_repositories import DECOUPLED, Repository
from tests.toolkit.events import checked, parsed

SCRIPTS = Path(__file__).parent / "fault_scripts"
NO_ROWS = {
    "reason": "no_rows",
    "error": {
        "code": "INVALID_ARGUMENT",
        "message_pattern": "input byte size mismatch for input 'X' for model 'batch_ident'. Expected [0-9]+, got 0",
    },
}
"""The rule that the hint about a batch without rows has."""
PIPELINES: dict[str, dict[str, Any]] = {
    "chain": {"stream": True},
    "outer": {},
    "stream_chain": {"stream": True},
    "writer": {},
    "stream_writer": {"stream": True},
    "declared_script": {"early_exit": [{"reason": "nothing", "error": {"code": "ALREADY_EXISTS", "message": "EXIT"}}]},
    "script": {},
    "rows": {},
    "rows_exit": {"model": "rows", "early_exit": [NO_ROWS]},
    "twice": {},
    "relay": {},
    "sender": {"stream": True},
}
SENDER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros((1, 3, 4), np.float32))])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Not decoupled, and sends its response with a response sender: Triton marks no end of a stream."""
NAMES = ("writer", "ident", "chain", "outer", "[0]", "'X'", "'T'")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[httpx.Client]:
    """A client of a gateway whose models fail as the request defines."""
    folder = tmp_path_factory.mktemp("faulty")
    _write_models(Repository(folder / "models"))
    config = {"pipelines": {name: {"model": name, **spec, "timeout_s": 10} for name, spec in PIPELINES.items()}}
    (folder / "gateway.yaml").write_text(json.dumps(config))
    with (
        running_triton(EmbeddedOptions(folder / "models", models_venv)) as triton,
        running_gateway(folder, triton_url=triton.grpc_url, config=str(folder / "gateway.yaml")) as gateway,
        httpx.Client(base_url=f"{gateway.url}/v1/pipelines/", timeout=30) as client,
    ):
        yield client


def _write_models(repository: Repository) -> None:
    image, script = "FP32:-1,3,4", "SCRIPT:STRING:1"
    one = "instance_group [ { kind: KIND_CPU count: 1 } ]"
    calls = f'{one}\nparameters {{ key: "bls_calls" value {{ string_value: "chain, stream_writer" }} }}'
    sources = {path.stem: path.read_text() for path in SCRIPTS.iterdir() if path.suffix == ".py"}
    repository.model("writer", script, f"T:{image}", one, script=sources["writer"])
    repository.model("stream_writer", script, f"T:{image}", f"{one}\n{DECOUPLED}", script=sources["stream_writer"])
    repository.model("sender", script, f"Y:{image}", one, script=SENDER)
    repository.model("ident", f"X:{image}", f"Y:{image}", one, script=sources["ident"])
    repository.model("script", script, f"Y:{image}", one, script=sources["script"])
    repository.model("declared_script", script, f"Y:{image}", calls, script=sources["script"])
    for name, writer in (("chain", "writer"), ("stream_chain", "stream_writer")):
        repository.ensemble(name, script, f"Y:{image}", f"{writer} SCRIPT=SCRIPT > T=mid", "ident X=mid > Y=Y")
    repository.ensemble("outer", script, f"Y:{image}", "chain SCRIPT=SCRIPT > Y=Y")
    repository.model("batch_writer", script, "T:FP32:3,4", one, batch=16, script=sources["writer"])
    repository.model("batch_ident", "X:FP32:3,4", "Y:FP32:3,4", one, batch=16, script=sources["ident"])
    batched = ("batch_writer SCRIPT=SCRIPT > T=mid", "batch_ident X=mid > Y=Y")
    repository.ensemble("rows", script, "Y:FP32:3,4", *batched, batch=16)
    writes = "writer SCRIPT=SCRIPT > T=mid"
    repository.ensemble("twice", script, f"Y:{image} Z:{image}", writes, "ident X=mid > Y=Y", "ident X=mid > Y=Z")
    repository.ensemble("relay", script, f"Y:{image}", writes, "ident X=mid > Y=next", "ident X=next > Y=Y")


def ask(faulty: httpx.Client, pipeline: str, **script: object) -> httpx.Response:
    return faulty.post(pipeline, json={"SCRIPT": json.dumps(script)})


def test_the_chain_works_without_faults(faulty: httpx.Client) -> None:
    for pipeline in ("chain", "outer", "script", "declared_script"):
        assert ask(faulty, pipeline).json()["Y"] == [[[0.0] * 4] * 3]


@pytest.mark.parametrize("pipeline", ["chain", "outer"])
def test_a_missing_output(faulty: httpx.Client, pipeline: str) -> None:
    problem = ask(faulty, pipeline, omit=True).json()
    assert problem["code"] == "contract_violation"
    assert problem["detail"] == "Step 'ident' did not receive its input 'X'."
    assert problem["hint"] == (
        "Step 'writer' (its output 'T') did not write it: always write the output, end the request with an "
        "early-exit error, or declare 'X' optional in the configuration of 'ident'."
    )


def test_an_empty_tensor_without_its_rank(faulty: httpx.Client) -> None:
    problem = ask(faulty, "chain", shape=[0]).json()
    assert problem["status"] == 502
    assert problem["detail"] == "Input 'X' of step 'ident' expects shape [-1,3,4] but received [0]."
    assert problem["hint"] == (
        "Step 'writer' (its output 'T') wrote an empty tensor of shape [0]: keep the rank in empty tensors (such as "
        "[0,3,4]), or end the request with an early-exit error."
    )


def test_a_wrong_shape(faulty: httpx.Client) -> None:
    problem = ask(faulty, "outer", shape=[1, 3, 5]).json()
    assert problem["detail"] == "Input 'X' of step 'ident' expects shape [-1,3,4] but received [1,3,5]."
    assert problem["hint"].startswith("Step 'writer' (its output 'T') wrote [1,3,5]: write [-1,3,4], or correct")


def test_a_wrong_datatype(faulty: httpx.Client) -> None:
    problem = ask(faulty, "chain", float64=True).json()
    assert problem["detail"] == "Input 'X' of step 'ident' expects datatype FP32 but received FP64."
    assert problem["hint"] == ("Step 'writer' (its output 'T') wrote FP64: convert the tensor to FP32 in that step.")


def test_no_rows_between_two_steps(faulty: httpx.Client) -> None:
    problem = ask(faulty, "rows", shape=[0, 3, 4]).json()
    assert (problem["status"], problem["code"]) == (502, "contract_violation")
    assert problem["detail"] == "Input 'X' of step 'batch_ident' received no rows."
    start = "Step 'batch_writer' (its output 'T') wrote no rows, and Triton runs no step without rows."
    assert problem["hint"].startswith(start)
    assert yaml.safe_load(problem["hint"][problem["hint"].index("{") :]) == NO_ROWS


def test_no_rows_are_an_early_exit_with_the_rule_of_the_hint(faulty: httpx.Client) -> None:
    assert ask(faulty, "rows_exit", shape=[0, 3, 4]).json() == {"Y": [], "early_exit": "no_rows"}
    assert ask(faulty, "rows_exit", shape=[1, 3, 4]).json() == {"Y": [[0.0] * 4] * 3, "early_exit": None}


def test_more_rows_than_the_next_step_takes(faulty: httpx.Client) -> None:
    problem = ask(faulty, "rows", shape=[20, 3, 4]).json()
    assert (problem["status"], problem["code"]) == (502, "contract_violation")
    assert problem["detail"] == "Input 'X' of step 'batch_ident' received more than 16 rows, its `max_batch_size`."
    assert problem["hint"] == (
        "Step 'batch_writer' (its output 'T') wrote more than 16 rows: write fewer, or raise `max_batch_size` of "
        "'batch_ident'."
    )


@pytest.mark.parametrize(
    ("pipeline", "writers"),
    [
        ("twice", "Step 'writer' (its output 'T')"),
        ("relay", "Step 'writer' (its output 'T') or step 'ident' (its output 'Y')"),
    ],
)
def test_a_fault_of_a_model_in_two_steps(faulty: httpx.Client, pipeline: str, writers: str) -> None:
    problem = ask(faulty, pipeline, omit=True).json()
    assert problem["detail"] == "Step 'ident' did not receive its input 'X'."
    assert problem["hint"].startswith(f"{writers} did not write it: always write the output")
    problem = ask(faulty, pipeline, float64=True).json()
    assert problem["hint"] == f"{writers} wrote FP64: convert the tensor to FP32 in that step."


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("pipeline", ["writer", "chain"])
def test_a_wrong_number_of_responses(faulty: httpx.Client, pipeline: str, count: int) -> None:
    problem = ask(faulty, pipeline, count=count).json()
    assert problem["code"] == "model_error"
    assert "`execute` of 'writer' must return one InferenceResponse for each request" in problem["hint"]
    assert "response sender needs model_transaction_policy { decoupled: true }" in problem["hint"]


def test_a_batch_that_cannot_be_split(faulty: httpx.Client) -> None:
    """Only C++ backends send this text. Here a Python model sends the text, because this Triton has no C++ backend."""
    text = (
        "failed to split the output tensor 'T' in responses: expected batch size of at least 2 in model output, got 1"
    )
    problem = ask(faulty, "chain", error=["UNSUPPORTED", text]).json()
    assert problem["code"] == "contract_violation"
    assert problem["hint"].startswith("Step 'writer' (its output 'T') wrote an output whose first dimension differs")


def test_a_deadlock(faulty: httpx.Client) -> None:
    """The model sends this text of Triton, because no request causes the error in Triton 2.51."""
    text = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
    problem = ask(faulty, "chain", error=["INVALID_ARG", text]).json()
    assert problem["detail"] == "An output of an ensemble was never set."
    assert problem["hint"].startswith(
        "A step of ensemble 'chain' did not write a tensor that an output depends on. The outputs are written: "
        "'Y' by step 'ident' (its output 'Y')."
    )


@pytest.mark.parametrize("raises", [False, True])
def test_a_fault_in_a_declared_call_of_a_bls_model(faulty: httpx.Client, raises: bool) -> None:
    problem = ask(faulty, "declared_script", shape=[0], raises=raises).json()
    assert problem["code"] == "contract_violation"
    assert problem["detail"] == "Input 'X' of step 'ident' expects shape [-1,3,4] but received [0]."
    assert "which a BLS script calls" in problem["hint"]


def test_a_fault_in_an_undeclared_call_names_no_model(faulty: httpx.Client) -> None:
    problem = ask(faulty, "script", omit=True).json()
    assert problem["code"] == "contract_violation"
    assert "declare `bls_calls`" in problem["hint"]
    assert not any(name in f"{problem['detail']}{problem['hint']}" for name in NAMES)


def test_a_bls_model_that_calls_a_decoupled_model_as_unary(faulty: httpx.Client) -> None:
    problem = ask(faulty, "declared_script", child="stream_writer").json()
    assert problem["hint"] == "Call 'stream_writer' with exec(decoupled=True) and read all its responses."


def test_a_bls_model_that_calls_a_missing_model(faulty: httpx.Client) -> None:
    problem = ask(faulty, "declared_script", child="nowhere").json()
    assert problem["hint"] == "Load the model in Triton, or correct the name that the script calls."


def test_an_early_exit_without_its_code_after_a_bls_call(faulty: httpx.Client) -> None:
    problem = ask(faulty, "declared_script", error=["ALREADY_EXISTS", "EXIT"]).json()
    assert problem["code"] == "model_error"
    assert problem["hint"].startswith("The message matches the early exit 'nothing', but the code does not.")


def test_the_text_of_an_exception_is_not_shown(faulty: httpx.Client) -> None:
    answer = ask(faulty, "declared_script", error=["INTERNAL", "a user's secret"], raises=True)
    assert answer.json()["detail"] == "Model 'declared_script' raised an exception."
    assert "When `execute` of 'declared_script' raises, " in answer.json()["hint"]
    assert "secret" not in answer.text


@pytest.mark.parametrize("script", [{"omit": True}, {"shape": [0]}])
def test_a_stream_gets_the_same_explanation(faulty: httpx.Client, script: dict[str, object]) -> None:
    problem = faulty.post("stream_chain/stream", json={"SCRIPT": json.dumps(script)}).json()
    assert problem["code"] == "contract_violation"
    assert problem["detail"].startswith(("Step 'ident'", "Input 'X' of step 'ident'"))
    assert problem["hint"].startswith("Step 'stream_writer' (its output 'T')")


def test_a_decoupled_model_that_returns_its_response(faulty: httpx.Client) -> None:
    problem = faulty.post("stream_writer/stream", json={"SCRIPT": json.dumps({"returns": True})}).json()
    assert problem["hint"].startswith("`execute` of 'stream_writer' must send every response")


def test_a_response_sender_ends_the_stream_of_a_model_that_is_not_decoupled(faulty: httpx.Client) -> None:
    assert ask(faulty, "sender").json() == {"Y": [[[0.0] * 4] * 3]}
    *outputs, last = checked(parsed(faulty.post("sender/stream", json={"SCRIPT": ""}).text))
    assert ([each.data for each in outputs], last.name) == ([{"Y": [[[0.0] * 4] * 3]}], "done")


def test_an_unknown_name_in_an_error_is_not_shown(faulty: httpx.Client) -> None:
    text = "unexpected shape for input 'my card is 4111' for model 'sesame'. Expected [1], got [2]. "
    answer = ask(faulty, "chain", error=["INVALID_ARG", text])
    assert answer.json()["code"] == "contract_violation"
    assert "4111" not in answer.text
    assert "sesame" not in answer.text


def test_the_graph_shows_the_steps_of_a_nested_ensemble(faulty: httpx.Client) -> None:
    graph = faulty.get("outer").json()["graph"]
    assert [step["name"] for step in graph["steps"]] == ["writer", "ident"]
    assert [(edge["from"], edge["to"], edge["shape"]) for edge in graph["edges"]] == [
        ({"step": None, "tensor": "SCRIPT"}, {"step": "writer", "tensor": "SCRIPT"}, [1]),
        ({"step": "writer", "tensor": "T"}, {"step": "ident", "tensor": "X"}, [-1, 3, 4]),
        ({"step": "ident", "tensor": "Y"}, {"step": None, "tensor": "Y"}, [-1, 3, 4]),
    ]
