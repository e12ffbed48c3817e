"""Every error has a status, an entry in the table, and a small answer that says what to do instead."""

import json
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.error_table import MAX_BYTES, ROW_BY_ERROR, problem_of, problem_response
from app.core.errors import (
    FieldProblem,
    GatewayError,
    InvalidInput,
    ModelError,
    UpstreamError,
)
from tests.api.conftest import CONFIG, PNG, READER, WRITER, scripted
from tests.toolkit.engine import FakeEngine, error_of, every_error
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.models import model, refusal, response, tensor

CODES_BY_STATUS = {
    400: {"invalid_json", "invalid_request", "context_length_exceeded"},
    401: {"unauthenticated"},
    403: {"forbidden"},
    404: {
        *("unknown_pipeline", "unknown_model", "unknown_stream", "unknown_session", "unknown_request"),
        *("unknown_example", "not_found"),
    },
    405: {"method_not_allowed"},
    408: {"slow_request"},
    409: {"step_out_of_turn"},
    410: {"session_lost", "stream_evicted"},
    413: {"payload_too_large"},
    415: {"unsupported_media_type"},
    422: {"idempotency_key_reused", "invalid_input"},
    429: {"too_many_requests"},
    426: {"upgrade_required"},
    431: {"headers_too_large"},
    499: {"cancelled", "client_closed_request", "slow_consumer"},
    500: {"internal"},
    501: {"resumable_streams_off", "http_sessions_off"},
    502: {"model_error", "contract_violation", "upstream_protocol", "tool_call_missing", "response_format_mismatch"},
    503: {"upstream_unavailable", "model_changed", "model_not_ready", "draining"},
    504: {"deadline_exceeded"},
}
"""The documented error codes of each status."""


@pytest.mark.parametrize("error", every_error())
def test_every_error_has_a_status_a_meaning_and_a_remedy(error: type[GatewayError]) -> None:
    row, response = ROW_BY_ERROR[error], problem_response(error_of(error), "rid")
    assert response.status_code == row.status
    retry_after_s = error.retry_after_s
    assert response.headers.get("Retry-After") == (None if retry_after_s is None else str(retry_after_s))
    assert row.meaning.endswith(".")
    assert row.remedy.endswith(".")


def test_errors_have_the_documented_statuses() -> None:
    by_status: dict[int, set[str]] = {}
    for error, row in ROW_BY_ERROR.items():
        by_status.setdefault(row.status, set()).add(error.code)
    assert by_status == CODES_BY_STATUS


def test_a_problem_has_the_fields_of_rfc_9457_and_its_own() -> None:
    error = InvalidInput("No.", hint='Send {"x": 1}.', errors=[FieldProblem("x", "is required")])
    error.upstream = UpstreamError("INTERNAL", "/secret/path")
    response = problem_response(error, "rid")
    assert response.status_code == 422
    assert response.media_type == "application/problem+json"
    assert json.loads(bytes(response.body)) == {
        "type": "/docs/errors/invalid_input",
        "title": "The input does not fit the pipeline",
        "status": 422,
        "detail": "No.",
        "code": "invalid_input",
        "request_id": "rid",
        "retryable": False,
        "errors": [{"field": "x", "problem": "is required"}],
        "hint": 'Send {"x": 1}.',
    }


long_text = st.text(alphabet=st.characters(), min_size=400, max_size=700) | st.sampled_from(
    ["\0" * 9999, '"' * 9999, "\\" * 9999, "\U0001f600" * 9999, "\ud800" * 9999, "\u2028" * 9999, "x" * 10**6]
)


@given(long_text, long_text, st.lists(st.tuples(long_text, long_text), max_size=20))
def test_no_answer_is_larger_than_four_kibibytes(detail: str, hint: str, items: list[tuple[str, str]]) -> None:
    error = InvalidInput(detail, hint=hint, errors=[FieldProblem(*each) for each in items])
    body = orjson.dumps(problem_of(error, "r" * 128))
    assert len(body) <= MAX_BYTES == 4096
    assert json.loads(body)["code"] == "invalid_input"
    assert len(json.loads(body).get("errors", [])) <= 8


READ = "/v1/pipelines/read"
WRITE = "/v1/pipelines/write"
INFER = "/v2/models/reader/infer"


def infer(**members: Any) -> dict[str, Any]:
    tensor = {"name": "NOTE", "datatype": "BYTES", "shape": [1], "data": ["a"]} | members
    return {"inputs": [tensor]}


NO_FILE = "Send application/json: no input of this pipeline is a file."
UNFIT = "Unable to parse 'data': Shape does not match true shape of 'data' field of input 'NOTE'."
DECLARE = "If an input is a file, declare `kind: image` or `kind: binary` for the input in gateway.yaml."
MISTAKES: list[tuple[str, dict[str, Any], int, str, str]] = [
    (
        WRITE,
        {"json": {"promt": "x"}},
        422,
        "'promt' is not a field of this pipeline; did you mean 'prompt'? (1 more).",
        "",
    ),
    (
        *(READ, {"json": {"image": "https://example.com/sign.png"}}, 422),
        *("'image' must be base64 or a data: URL; the gateway does not download addresses.", ""),
    ),
    (
        *(f"{READ}/stream", {"json": {"image": ""}}, 400),
        "This pipeline does not stream: POST /v1/pipelines/read returns its whole answer.",
        "An operator can declare `stream: true` for it in gateway.yaml.",
    ),
    (
        *(WRITE, {"content": b"x", "headers": {"Content-Type": "text/plain"}}, 415),
        *(NO_FILE, "With curl, add: -H 'Content-Type: application/json'"),
    ),
    (WRITE, {"content": PNG, "headers": {"Content-Type": "image/png"}}, 415, NO_FILE, DECLARE),
    *(
        (INFER, {"json": infer(**members)}, 400, error, "")
        for members, error in (
            ({"name": "NOTES"}, "unexpected inference input 'NOTES' for model 'reader'; it has IMAGE, NOTE."),
            ({"shape": [2]}, "unexpected shape for input 'NOTE' for model 'reader'. Expected [1], got [2]."),
            ({"data": ["a", "b"]}, f"{UNFIT} Expected 1 elements for shape [1], got 2."),
            ({"data": [7]}, "Input 'NOTE' has data that are not BYTES, or out of its range."),
        )
    ),
]


@pytest.mark.parametrize(("path", "sent", "status", "detail", "hint"), MISTAKES)
async def test_a_mistake_in_a_request_is_explained(
    api: Served, path: str, sent: Mapping[str, Any], *, status: int, detail: str, hint: str
) -> None:
    answer = await api.client.post(path, **sent)
    problem = answer.json()
    explained = problem["error" if path == INFER else "detail"]
    assert (answer.status_code, explained, problem.get("hint", "")) == (status, detail, hint)


async def test_the_step_that_refused_the_input_is_named_with_the_fields_that_it_reads() -> None:
    text = CONFIG.replace("    warmup: false\n  write:", "    rejects_input: [reader]\n    warmup: false\n  write:")
    async with scripted(text) as api:
        error = ModelError("Model 'reader' failed.")
        error.upstream = UpstreamError("INVALID_ARGUMENT", "reader: not an image")
        api.engine.answers = [error]
        problem = (await api.client.post(READ, content=PNG, headers={"Content-Type": "image/png"})).json()
    assert problem["code"] == "invalid_input"
    assert problem["detail"] == "Model 'reader' refused the input. It reads 'image' and 'note'."
    assert problem["hint"] == "The gateway's log has the model's message in the line with this request id."


async def test_without_gateway_yaml_everything_is_503_until_triton_answers() -> None:
    """Only Triton knows the pipelines then."""
    engine = FakeEngine.of(READER, WRITER)
    engine.is_up = False
    async with served(engine, None) as api:
        for path in (WRITE, "/v1/completions"):
            answer = await api.client.post(path, json={"prompt": "x", "model": "write"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "Triton cannot be reached, so the pipelines are not known yet." in answer.text
        lists = ("/v1/pipelines", "/v1/models")
        assert [(await api.client.get(path)).status_code for path in lists] == [503, 503]
        engine.is_up = True
        await api.gateway.inference.catalog.follow_models()
        assert [(await api.client.get(path)).status_code for path in lists] == [200, 200]


REFUSALS = """
pipelines:
  write:
    model: writer
    inputs: {line: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    parameters: {limit: {type: integer, optional: true}}
    stream: true
    refusals: &refusals
      - {message_pattern: is longer than the maximum, code: context_length_exceeded, field: line}
      - {message_pattern: cannot be empty, code: invalid_input, field: line, detail: The prompt is empty.}
    openai:
      completions: {prompt: line}
      chat: {prompt: line, template_text: x}
      parameters: {max_tokens: limit}
  embed:
    model: embedder
    inputs: {line: {tensor: PROMPT, kind: text}}
    outputs: {embedding: {tensor: VECTOR}}
    refusals: *refusals
    openai: {embeddings: {input: line}}
"""
REFUSER = model("PROMPT BYTES [1]", "TEXT BYTES [1]", name="writer", decoupled=True)
EMBEDDER = model("PROMPT BYTES [1]", "VECTOR FP32 [2]", name="embedder", max_batch_size=4)
TOO_LONG = "The decoder prompt (length 4001) is longer than the maximum model length of 512"
EMPTY = "The decoder prompt cannot be empty"
WORD = response(tensor("TEXT", "BYTES", [b"hi"]), is_final=False)
PROMPT = {"line": "Hi"}
COMPLETION = {"model": "write", "prompt": "Hi"}
CHAT = {"model": "write", "messages": [{"role": "user", "content": "Hi"}]}


refusing = gateway_fixture(REFUSALS, REFUSER, EMBEDDER)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/pipelines/write", PROMPT, "line"),
        ("/v1/pipelines/write/stream", PROMPT, "line"),
        ("/v1/completions", COMPLETION, "prompt"),
        ("/v1/completions", COMPLETION | {"stream": True}, "prompt"),
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/chat/completions", CHAT | {"stream": True}, "messages"),
        ("/v1/embeddings", {"model": "embed", "input": "Hi"}, "input"),
    ],
)
async def test_a_rule_gives_the_code_and_the_callers_own_field(
    refusing: Served, path: str, body: dict[str, Any], field: str
) -> None:
    for message, status, code, detail in (
        (TOO_LONG, 400, "context_length_exceeded", "The request is longer than the model's context."),
        (EMPTY, 422, "invalid_input", "The prompt is empty."),
        ("No such thing", 502, "model_error", "Model 'model' failed."),
    ):
        refusing.engine.answers = [refusal(message, None)]
        answer = await refusing.client.post(path, json=body)
        assert message not in answer.text
        problem = answer.json()
        if "error" in problem:
            of_openai = (502, "server_error", None) if status == 502 else (400, "invalid_request_error", field)
            error = problem["error"]
            assert (answer.status_code, error["type"], error["param"], error["code"]) == (*of_openai, code)
        else:
            assert (answer.status_code, problem["code"], problem["detail"]) == (status, code, detail)
            assert [each["field"] for each in problem.get("errors", ())] == ([] if status == 502 else [field])


async def test_a_stream_that_has_begun_ends_with_the_same_error(refusing: Served) -> None:
    refusing.engine.answers = [WORD, refusal(TOO_LONG, None)]
    answer = await refusing.client.post("/v1/pipelines/write/stream", json=PROMPT)
    assert answer.status_code == 200
    assert '"code":"context_length_exceeded"' in answer.text
    answer = await refusing.client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert (answer.status_code, '"code":"context_length_exceeded"' in answer.text) == (200, True)


async def test_under_v2_no_rule_of_a_pipeline_applies(refusing: Served) -> None:
    refusing.engine.answers = [refusal(TOO_LONG, "INTERNAL")]
    body = {"inputs": [{"name": "PROMPT", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}]}
    answer = await refusing.client.post("/v2/models/writer/infer", json=body)
    assert (answer.status_code, answer.json()["error"]) == (500, "Model 'model' failed.")
