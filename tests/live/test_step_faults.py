"""The hints of unclear errors of chains of models, on the real Triton: what a step did wrong, and how to correct it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.toolkit.broken_repositories import DECOUPLED, Repository
from tests.toolkit.events import checked, parsed
from tests.toolkit.processes import live_gateway, live_triton

SCRIPT = (Path(__file__).parent / "fault_model.py").read_text()
NO_ROWS = {
    "reason": "no_rows",
    "error": {
        "code": "INVALID_ARGUMENT",
        "message_pattern": "input byte size mismatch for input 'X' for model 'batch_ident'. Expected [0-9]+, got 0",
    },
}
"""The rule that the hint about a batch without rows has."""
FAULTY: dict[str, dict[str, Any]] = {
    "chain": {"stream": True},
    "outer": {},
    "stream_chain": {"stream": True},
    "writer": {},
    "stream_writer": {"stream": True},
    "declared_script": {"early_exit": [{"reason": "nothing", "error": {"code": "ALREADY_EXISTS", "message": "EXIT"}}]},
    "script": {},
    "rows": {},
    "rows_exit": {"model": "rows", "early_exit": [NO_ROWS]},
    "relay": {},
    "sender": {"stream": True},
}
NAMES = ("writer", "ident", "chain", "outer", "[0]", "'X'", "'T'")


def _write_models(repository: Repository) -> None:
    image, script = "FP32:-1,3,4", "SCRIPT:STRING:1"
    one = "instance_group [ { kind: KIND_CPU count: 1 } ]"
    calls = f'{one}\nparameters {{ key: "bls_calls" value {{ string_value: "chain, stream_writer" }} }}'
    models = [
        ("writer", script, f"T:{image}", one),
        ("stream_writer", script, f"T:{image}", f"{one}\n{DECOUPLED}"),
        ("sender", script, f"Y:{image}", one),
        ("ident", f"X:{image}", f"Y:{image}", one),
        ("script", script, f"Y:{image}", one),
        ("declared_script", script, f"Y:{image}", calls),
    ]
    for model in models:
        repository.model(*model, script=SCRIPT)
    for name, writer in (("chain", "writer"), ("stream_chain", "stream_writer")):
        repository.ensemble(name, script, f"Y:{image}", f"{writer} SCRIPT=SCRIPT > T=mid", "ident X=mid > Y=Y")
    repository.ensemble("outer", script, f"Y:{image}", "chain SCRIPT=SCRIPT > Y=Y")
    repository.model("batch_writer", script, "T:FP32:3,4", one, batch=16, script=SCRIPT)
    repository.model("batch_ident", "X:FP32:3,4", "Y:FP32:3,4", one, batch=16, script=SCRIPT)
    batched = ("batch_writer SCRIPT=SCRIPT > T=mid", "batch_ident X=mid > Y=Y")
    repository.ensemble("rows", script, "Y:FP32:3,4", *batched, batch=16)
    steps = "writer SCRIPT=SCRIPT > T=mid", "ident X=mid > Y=next", "ident X=next > Y=Y"
    repository.ensemble("relay", script, f"Y:{image}", *steps)


triton = live_triton(lambda folder: _write_models(Repository(folder)))
gateway = live_gateway({name: {"model": name, **spec, "timeout_s": 10} for name, spec in FAULTY.items()})


def ask(client: httpx.Client, pipeline: str, **script: object) -> httpx.Response:
    return client.post(f"/v1/pipelines/{pipeline}", json={"SCRIPT": json.dumps(script)})


WRITER, STREAM_WRITER = "Step 'writer' (its output 'T')", "Step 'stream_writer' (its output 'T')"
BOTH = f"{WRITER} or step 'ident' (its output 'Y')"
OMITTED = "did not write it: always write the output, end the request with an early-exit error, or declare 'X' optional"
MISSING = "Step 'ident' did not receive its input 'X'."
RECEIVED = "Input 'X' of step 'ident' expects shape [-1,3,4] but received"
FLOAT64 = "Input 'X' of step 'ident' expects datatype FP32 but received FP64."
NO_RANK = f"{WRITER} wrote an empty tensor of shape [0]: keep the rank in empty tensors (such as [0,3,4]), or end"
UNSPLIT = "failed to split the output tensor 'T' in responses: expected batch size of at least 2 in model output, got 1"
"""Only C++ backends send this text. This Triton has none."""
DEADLOCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
"""No request causes this error in Triton 2.51."""
BATCH_WRITER = "Step 'batch_writer' (its output 'T')"
Row = tuple[str, dict[str, object], str, str]
VIOLATIONS: list[Row] = [
    ("chain", {"omit": True}, MISSING, f"{WRITER} {OMITTED}"),
    ("relay", {"omit": True}, MISSING, f"{BOTH} {OMITTED}"),
    ("stream_chain/stream", {"omit": True}, MISSING, f"{STREAM_WRITER} {OMITTED}"),
    ("script", {"omit": True}, "", "declare `bls_calls`"),
    ("chain", {"float64": True}, FLOAT64, f"{WRITER} wrote FP64: convert the tensor to FP32 in that step."),
    ("chain", {"shape": [0]}, f"{RECEIVED} [0].", NO_RANK),
    ("declared_script", {"shape": [0]}, f"{RECEIVED} [0].", "which a BLS script calls"),
    ("declared_script", {"shape": [0], "raises": True}, f"{RECEIVED} [0].", "which a BLS script calls"),
    ("outer", {"shape": [1, 3, 5]}, f"{RECEIVED} [1,3,5].", f"{WRITER} wrote [1,3,5]: write [-1,3,4], or correct"),
    ("rows", {"shape": [0, 3, 4]}, "'batch_ident' received no rows.", f"{BATCH_WRITER} wrote no rows"),
    ("rows", {"shape": [20, 3, 4]}, "more than 16 rows, its `max_batch_size`.", f"{BATCH_WRITER} wrote more than 16"),
    ("chain", {"error": ["UNSUPPORTED", UNSPLIT]}, "", f"{WRITER} wrote an output whose first dimension differs"),
]
"""Pipeline, what its models do, and parts of the detail and of the hint."""
ONE_RESPONSE = "`execute` of 'writer' must return one InferenceResponse for each request"
MODEL_ERRORS: list[Row] = [
    ("writer", {"count": 0}, "", ONE_RESPONSE),
    ("writer", {"count": 2}, "", "response sender needs model_transaction_policy { decoupled: true }"),
    ("declared_script", {"child": "stream_writer"}, "", "Call 'stream_writer' with exec(decoupled=True) and read all"),
    ("declared_script", {"child": "nowhere"}, "", "Load the model in Triton, or correct the name that the script"),
    ("declared_script", {"error": ["INTERNAL", "EARLY_EXIT[empty]"]}, "", "If this is an early exit, declare it under"),
    ("declared_script", {"error": ["ALREADY_EXISTS", "EXIT"]}, "", "matches the early exit 'nothing', but the code"),
    (
        "declared_script",
        {"error": ["INTERNAL", "a user's secret"], "raises": True},
        "Model 'declared_script' raised an exception.",
        "When `execute` of 'declared_script' raises, ",
    ),
    ("chain", {"error": ["INVALID_ARG", DEADLOCK]}, "An output of an ensemble was never set.", "'Y' by step 'ident'"),
    ("stream_writer/stream", {"returns": True}, "", "`execute` of 'stream_writer' must send every response"),
]


@pytest.mark.parametrize(("code", "cases"), [("contract_violation", VIOLATIONS), ("model_error", MODEL_ERRORS)])
def test_the_problem_says_what_a_step_did_wrong(client: httpx.Client, code: str, cases: list[Row]) -> None:
    for pipeline, script, detail, hint in cases:
        answer = ask(client, pipeline, **script)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (502, code), (pipeline, script, problem)
        assert (detail in problem["detail"], hint in problem["hint"]) == (True, True), (pipeline, script, problem)
        assert "secret" not in answer.text


def test_no_rows_are_an_early_exit_with_the_rule_of_the_hint(client: httpx.Client) -> None:
    hint = ask(client, "rows", shape=[0, 3, 4]).json()["hint"]
    assert yaml.safe_load(hint[hint.index("{") :]) == NO_ROWS
    assert ask(client, "rows_exit", shape=[0, 3, 4]).json() == {"Y": [], "early_exit": "no_rows"}
    assert ask(client, "rows_exit", shape=[1, 3, 4]).json() == {"Y": [[0.0] * 4] * 3, "early_exit": None}


def test_a_fault_in_an_undeclared_call_names_no_model(client: httpx.Client) -> None:
    problem = ask(client, "script", omit=True).json()
    assert not any(name in f"{problem['detail']}{problem['hint']}" for name in NAMES)


def test_a_response_sender_ends_the_stream_of_a_model_that_is_not_decoupled(client: httpx.Client) -> None:
    assert ask(client, "sender").json() == {"Y": [[[0.0] * 4] * 3]}
    *outputs, last = checked(parsed(client.post("/v1/pipelines/sender/stream", json={"SCRIPT": ""}).text))
    assert ([each.data for each in outputs], last.name) == ([{"Y": [[[0.0] * 4] * 3]}], "done")


def test_an_unknown_name_in_an_error_is_not_shown(client: httpx.Client) -> None:
    text = "unexpected shape for input 'my card is 4111' for model 'sesame'. Expected [1], got [2]. "
    answer = ask(client, "chain", error=["INVALID_ARG", text])
    assert answer.json()["code"] == "contract_violation"
    assert "4111" not in answer.text
    assert "sesame" not in answer.text
