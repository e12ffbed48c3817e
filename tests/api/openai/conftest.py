"""A gateway whose pipelines declare ``openai:``, over an engine with scripted answers."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from app.api.bodies import Limits
from app.core.inference import InferenceResponse, Tensor, bytes_array
from tests.pipelines.test_presets import CONFIGS
from tests.pipelines.test_presets import answer as llm_api_answer
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
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
    early_exit: [{reason: nothing, error: {code: any, message: EXIT}}]
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
EMBEDS = model(
    ["text_input BYTES [1]", "embedding_request BYTES [1] optional", "return_num_input_tokens BOOL [1] optional"],
    ["text_output BYTES [-1]", "num_input_tokens UINT32 [1]"],
    decoupled=True,
)
"""vLLM with a model of vectors."""


def word(text: bytes, *, prompt_tokens: int | None = None, why: bytes | None = None) -> InferenceResponse:
    """Returns a response of the model with one token."""
    tensors = [tensor("TEXT", "BYTES", [text]), tensor("IDS", "INT32", [1])]
    tensors += [] if prompt_tokens is None else [tensor("COUNT", "INT32", [prompt_tokens])]
    tensors += [] if why is None else [tensor("WHY", "BYTES", [why])]
    return response(*tensors, is_final=why is not None)


HELLO = [word(b"Hel", prompt_tokens=5), word(b"lo"), word(b" you", why=b"length")]


api = gateway_fixture(CONFIG, WRITER, ECHO, EMBEDDER, answers=HELLO)


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


def step(
    text: bytes, *, reason: bytes = b"None", count: int = 1, logprobs: object = None, is_final: bool = False
) -> InferenceResponse:
    """A response of vLLM."""
    return response(
        tensor("text_output", "BYTES", [text]),
        tensor("finish_reason", "BYTES", [reason]),
        tensor("logprobs", "BYTES", [json.dumps(logprobs).encode()]),
        tensor("num_input_tokens", "UINT32", 7),
        tensor("num_output_tokens", "UINT32", [count]),
        is_final=is_final,
    )


def engine_step(text: bytes, *, is_final: bool) -> InferenceResponse:
    """A response of TensorRT-LLM's ensemble."""
    return response(
        Tensor("text_output", "BYTES", bytes_array([text], (1, 1))),
        tensor("num_input_tokens", "INT32", [[7]]),
        tensor("num_output_tokens", "INT32", [[1]]),
        is_final=is_final,
    )


ASKED = [{"role": "user", "content": "Hi"}]
ADDRESSES = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings"}
BODIES: dict[str, Any] = {"chat": {"messages": ASKED}, "completions": {"prompt": "Hi"}, "embeddings": {"input": "a"}}
OF_EMBEDDINGS: dict[str, Any] = {
    "metadata": {"team": "search"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "hash",
    "service_tier": "flex",
    "store": True,
    "user": "me",
}
"""Values without an effect."""
NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names or ("weather",)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


LLAMA = """
pipelines:
  llama:
    model: model
    preset: PRESET
    warmup: false
    openai:
      chat:
        variables: {fixed: 1}
        template_text: >-
          {{ {"messages": messages, "tools": tools, "effort": reasoning_effort | default(none),
          "deep": deep | default(none)} | tojson }}<think>
      tools: FORMAT
      reasoning: REASONING
"""


def steps_of(preset: str, *pieces: str) -> list[InferenceResponse]:
    """The responses of a backend that writes these pieces."""
    ends = [(piece.encode(), index == len(pieces)) for index, piece in enumerate(pieces, 1)]
    if preset == "vllm":
        return [step(piece, reason=b"stop" if is_last else b"None", is_final=is_last) for piece, is_last in ends]
    if preset == "tensorrt_llm":
        return [engine_step(piece, is_final=is_last) for piece, is_last in ends]
    return [
        llm_api_answer("".join(pieces[:count]), is_final=count == len(pieces)) for count in range(1, len(pieces) + 1)
    ]


class Gateways:
    """A gateway for each combination of keys, made when a test asks for it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def of(
        self, format_: str = "hermes", preset: str = "vllm", reasoning: str = "none", says: Sequence[str] = ()
    ) -> Served:
        """``says``: the pieces of its answer. gpt-oss always has reasoning."""
        reasoning = "gpt_oss" if format_ == "gpt_oss" else reasoning
        text = LLAMA.replace("PRESET", preset).replace("FORMAT", format_).replace("REASONING", reasoning)
        engine = FakeEngine.of(CONFIGS[preset], answers=steps_of(preset, *says))
        return await self._stack.enter_async_context(served(engine, text, limits=Limits(1024 * 1024)))


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    async with AsyncExitStack() as stack:
        yield Gateways(stack)


async def ask(api: Served, *, messages: Sequence[Mapping[str, Any]] = ASKED, **body: Any) -> httpx.Response:
    return await api.client.post("/v1/chat/completions", json={"model": "llama", "messages": messages} | body)


def inputs(api: Served, index: int = -1) -> dict[str, Any]:
    return {each.name: each.array.reshape(-1)[0] for each in api.engine.requests[index].inputs}


def sampling(api: Served, index: int = -1) -> Any:
    return json.loads(inputs(api, index)["sampling_parameters"])


def message_of(answered: httpx.Response) -> Any:
    assert answered.status_code == 200, answered.text
    return answered.json()["choices"][0]["message"]
