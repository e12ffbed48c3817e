"""A message that ``refusals`` knows is the caller's error in every dialect, before and after the first output."""

from typing import Any

import pytest

from app.core.errors import GatewayError
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.models import model, refusal, response, tensor

CONFIG = """
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
WRITER = model("PROMPT BYTES [1]", "TEXT BYTES [1]", name="writer", decoupled=True)
EMBEDDER = model("PROMPT BYTES [1]", "VECTOR FP32 [2]", name="embedder", max_batch_size=4)
TOO_LONG = "The decoder prompt (length 4001) is longer than the maximum model length of 512"
EMPTY = "The decoder prompt cannot be empty"
WORD = response(tensor("TEXT", "BYTES", [b"hi"]), is_final=False)
PROMPT = {"line": "Hi"}
COMPLETION = {"model": "write", "prompt": "Hi"}
CHAT = {"model": "write", "messages": [{"role": "user", "content": "Hi"}]}


api = gateway_fixture(CONFIG, WRITER, EMBEDDER)


def failing(message: str) -> GatewayError:
    """A new error, because the gateway completes an error that it shows."""
    return refusal(message, None)


@pytest.mark.parametrize("path", ["/v1/pipelines/write", "/v1/pipelines/write/stream"])
async def test_a_pipeline_answers_with_the_code_and_the_field(api: Served, path: str) -> None:
    for message, status, code, detail in (
        (TOO_LONG, 400, "context_length_exceeded", "The request is longer than the model's context."),
        (EMPTY, 422, "invalid_input", "The prompt is empty."),
        ("No such thing", 502, "model_error", "Model 'model' failed."),
    ):
        api.engine.answers = [failing(message)]
        answer = await api.client.post(path, json=PROMPT)
        problem = answer.json()
        assert (answer.status_code, problem["code"], problem["detail"]) == (status, code, detail)
        assert [each["field"] for each in problem.get("errors", ())] == ([] if status == 502 else ["line"])
        assert message not in answer.text
        page = await api.client.get(problem["type"])
        assert (page.status_code, code in page.text) == (200, True)


async def test_a_stream_that_has_begun_ends_with_the_same_error(api: Served) -> None:
    api.engine.answers = [WORD, failing(TOO_LONG)]
    answer = await api.client.post("/v1/pipelines/write/stream", json=PROMPT)
    assert answer.status_code == 200
    assert '"code":"context_length_exceeded"' in answer.text
    answer = await api.client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert (answer.status_code, '"code":"context_length_exceeded"' in answer.text) == (200, True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", COMPLETION, "prompt"),
        ("/v1/completions", COMPLETION | {"stream": True}, "prompt"),
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/chat/completions", CHAT | {"stream": True}, "messages"),
        ("/v1/embeddings", {"model": "embed", "input": "Hi"}, "input"),
    ],
)
async def test_openais_clients_get_openais_code_and_their_own_field(
    api: Served, path: str, body: dict[str, Any], param: str
) -> None:
    for message, code in ((TOO_LONG, "context_length_exceeded"), (EMPTY, "invalid_input")):
        api.engine.answers = [failing(message)]
        answer = await api.client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["code"], error["param"]) == (code, param)


async def test_under_v2_no_rule_of_a_pipeline_applies(api: Served) -> None:
    api.engine.answers = [refusal(TOO_LONG, "INTERNAL")]
    body = {"inputs": [{"name": "PROMPT", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}]}
    answer = await api.client.post("/v2/models/writer/infer", json=body)
    assert (answer.status_code, answer.json()["error"]) == (500, "Model 'model' failed.")
