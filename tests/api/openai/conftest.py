"""A gateway whose pipelines declare ``openai:``, over an engine with scripted answers."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.core.inference import InferenceResponse
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.models import model, response, tensor

CONFIG = """
pipelines:
  write:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs:
      text: {tensor: TEXT, kind: text}
      finish_reason: {tensor: WHY, kind: text, join: last}
    parameters:
      max_tokens: {type: integer, minimum: 1, maximum: 64, default: 16}
      temperature: {type: number, minimum: 0, maximum: 2, optional: true}
      top_p: {type: number, optional: true}
      seed: {type: integer, optional: true}
    early_exit: [{reason: nothing, error: {code: any, message: EXIT}}]
    contract: {IDS: {max_items: 2}}
    cancel: {model: writer, input: CANCEL}
    stream: {commit_s: 0.05, progress_s: 5}
    openai:
      completions: {}
      chat:
        template_text: "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
      usage: {prompt_tokens: COUNT, completion_tokens: IDS}
  echo:
    model: echo
    inputs: {line: {tensor: LINE, kind: text}}
    outputs: {answer: {tensor: ANSWER, kind: text}}
    parameters: {limit: {type: integer, maximum: 9, optional: true}}
    stream: true
    openai:
      completions: {prompt: line, text: answer}
      parameters: {max_tokens: limit}
  embed:
    model: embedder
    inputs: {text: {tensor: TEXT, kind: text}}
    outputs: {embedding: {tensor: VECTOR}}
    openai: {embeddings: {}, usage: {prompt_tokens: TOKENS}}
  other:
    model: echo
    inputs: {line: {tensor: LINE, kind: text}}
"""
WRITER = model(
    "PROMPT BYTES [1]",
    ["TEXT BYTES [1]", "IDS INT32 [-1]", "WHY BYTES [1]", "COUNT INT32 [1]"],
    name="writer",
    decoupled=True,
)
ECHO = model("LINE BYTES [1]", "ANSWER BYTES [1]", name="echo")
EMBEDDER = model("TEXT BYTES [1]", ["VECTOR FP32 [2]", "TOKENS INT32 [1]"], name="embedder", max_batch_size=4)
FINAL = InferenceResponse({}, is_final=True)

Api = Served


def word(text: bytes, *, prompt_tokens: int | None = None, why: bytes | None = None) -> InferenceResponse:
    """Returns a response of the model with one token."""
    tensors = [tensor("TEXT", "BYTES", [text]), tensor("IDS", "INT32", [1])]
    tensors += [] if prompt_tokens is None else [tensor("COUNT", "INT32", [prompt_tokens])]
    tensors += [] if why is None else [tensor("WHY", "BYTES", [why])]
    return response(*tensors, is_final=why is not None)


HELLO = [word(b"Hel", prompt_tokens=5), word(b"lo"), word(b" you", why=b"length")]


api = gateway_fixture(CONFIG, WRITER, ECHO, EMBEDDER, answers=HELLO)


@pytest.fixture
def complete(api: Served) -> Callable[..., Any]:
    async def post(path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await api.client.post(path, json={"model": "write", "prompt": "Hi"} | body)

    return post


@pytest.fixture
def chat(api: Served) -> Callable[..., Any]:
    async def post(**body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await api.client.post("/v1/chat/completions", json={"model": "write", "messages": messages} | body)

    return post


def chunks(answer: httpx.Response) -> list[Any]:
    """Returns the data of each event, including ``[DONE]``."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [frame for frame in answer.text.split("\n\n") if frame.startswith("data: ")]
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Returns status, code and param of an error in OpenAI's format."""
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert len(answer.content) < 4096
    return answer.status_code, body["error"]["code"], body["error"]["param"]
