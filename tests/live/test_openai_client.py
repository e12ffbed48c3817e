"""OpenAI's Python client reads the texts and errors of the reference models, as Triton has them.

Also over stand-ins with the tensors and habits of each LLM backend: texts, vectors, images, tools.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from app.cli import main
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.side_by_side import triton_text
from tests.llm.test_template import LLAVA
from tests.toolkit.http_server import GIF, PNG
from tests.toolkit.llm_backends import (
    BACKENDS,
    EMBED,
    TEMPLATE,
    TOOL_PIPELINES,
    TOOL_TEXTS,
    live_llms,
    text_of_triton,
    write_backends,
)
from tests.toolkit.processes import GatewayProcess, live_gateway, live_triton
from tests.toolkit.waiting import eventually

CHATS = {"parts": {"template_text": LLAVA}, "texts": {"template_text": TEMPLATE, "image_marker": "<image>"}}
"""A template that takes parts, and one that takes texts."""
OF_IMAGES = {
    f"{name}-{form}": {"model": name, "preset": name, "openai": {"chat": chat}}
    for name in ("vllm", "tensorrt_llm_api")
    for form, chat in CHATS.items()
}
PROMPT = "The for statement"
SAMPLING: dict[str, Any] = {"max_tokens": 24, "seed": 7, "temperature": 0.8}
PIPELINES = TOOL_PIPELINES | OF_IMAGES | EMBED
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class City(BaseModel):
    name: str
    population: int
    parts: list["City"] = []


LIMA = City(name="Lima", population=10_000_000, parts=[City(name="Z\u00fcrich", population=1)])


backends, llms, declared = live_triton(write_backends), live_llms(), live_gateway(PIPELINES, "backends")


def client_of(gateway: str) -> Any:
    """A fixture of a module: a client of the gateway of another fixture."""

    @pytest.fixture(scope="module")
    def client(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
        base_url = f"{request.getfixturevalue(gateway).url}/v1"
        with OpenAI(base_url=base_url, api_key="none", max_retries=0) as found:
            yield found

    return client


sdk, undeclared, of_declared = client_of("gateway"), client_of("llms"), client_of("declared")


def test_a_completion_matches_triton_whole_and_in_chunks(sdk: OpenAI, triton: EmbeddedTriton) -> None:
    assert [model.id for model in sdk.models.list()] == ["write", "write_steps", "embed", "scripted_stream"]
    expected = triton_text(triton.http_url, PROMPT)
    answer = sdk.completions.create(model="write", prompt=PROMPT, **SAMPLING)
    assert answer.usage is not None
    tokens = {"prompt": answer.usage.prompt_tokens, "completion": answer.usage.completion_tokens}
    assert {"text": answer.choices[0].text, **tokens} == expected
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(sdk.completions.create(model="write", prompt=PROMPT, **options, **SAMPLING))
    assert text_of(chunks) == expected["text"]
    assert len(chunks) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage


def test_the_client_raises_an_error_of_a_stream(sdk: OpenAI) -> None:
    script = json.dumps({"outputs": 2, "interval_s": 0.05, "then": "error"})
    texts = []
    with pytest.raises(openai.APIError) as caught:
        texts.extend(
            chunk.choices[0].text
            for chunk in sdk.completions.create(model="scripted_stream", prompt=script, stream=True)
        )
    assert caught.value.code == "model_error"
    assert type(caught.value) is openai.APIError


def test_the_client_does_not_retry_a_model_error(gateway: GatewayProcess) -> None:
    """The client retries statuses from 500, unless the header X-Should-Retry is false."""
    labels = {"pipeline": "scripted_stream", "outcome": "model_error"}
    before = gateway.metric("requests_total", **labels)
    script = json.dumps({"outputs": 0, "then": "error"})
    with (
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=2) as sdk,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        sdk.completions.create(model="scripted_stream", prompt=script)
    assert (caught.value.status_code, caught.value.code) == (502, "model_error")
    eventually(lambda: gateway.metric("requests_total", **labels) == before + 1)


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


@pytest.mark.parametrize("name", BACKENDS)
def test_texts_are_those_of_the_backend(undeclared: OpenAI, llms: GatewayProcess, name: str) -> None:
    """Chats use the template of the tokenizer folder."""
    whole = undeclared.completions.create(model=name, prompt="Once")
    chunks = list(undeclared.completions.create(model=name, prompt="Once", stream=True))
    assert whole.choices[0].text == text_of_triton(llms, name, "Once")
    assert "".join(each.choices[0].text for each in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    answer = undeclared.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == text_of_triton(llms, name, "<user>Hi")
    assert answer.usage is not None or name == "tensorrt_llm"


async def test_a_vector_for_each_text_in_order(declared: GatewayProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{declared.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model="embed", input=["a" * length for length in range(1, 101)])
    assert [each.embedding for each in answer.data] == [[length, 0.5, 0.5, 0.5] for length in range(1, 101)]
    assert answer.usage.prompt_tokens == sum(range(1, 101))


@pytest.mark.parametrize("model", OF_IMAGES)
def test_the_model_sees_the_images_in_their_order(of_declared: OpenAI, model: str) -> None:
    """The stand-ins say the number of markers in the prompt, and the bytes of each image."""

    def image(content: bytes, media_type: str) -> dict[str, Any]:
        url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    first, second = {"type": "text", "text": "Compare "}, {"type": "text", "text": " and "}
    content = [first, image(PNG, "image/png"), second, image(GIF, "image/gif")]
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    answer = of_declared.chat.completions.create(model=model, messages=messages)
    assert answer.choices[0].message.content == f"2: {PNG.hex()} {GIF.hex()}"
    stream = of_declared.chat.completions.create(model=model, messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content


def asking(text: str) -> Any:
    return [{"role": "user", "content": f"Please write: {text}"}]


@pytest.mark.parametrize("name", TOOL_TEXTS)
def test_a_call_whole_and_added_up_by_the_clients_helper(of_declared: OpenAI, name: str) -> None:
    messages = asking(TOOL_TEXTS[name])
    with of_declared.chat.completions.stream(model=name, messages=messages, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    whole = of_declared.chat.completions.create(model=name, messages=messages, tools=TOOLS).choices[0]
    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        message = choice.message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        found = (call.function.name, json.loads(call.function.arguments), message.content)
        assert found == ("weather", {"city": "Z\u00fcrich"}, "Wait.")
        assert (message.model_extra or {}).get("reasoning_content") == (None if name == "mistral" else "Hm.")


def test_the_clients_parse_returns_the_model(of_declared: OpenAI) -> None:
    """The backend gets the schema, which names itself."""
    messages = asking(LIMA.model_dump_json())
    for tools in (openai.omit, TOOLS):
        answer = of_declared.chat.completions.parse(
            model="mistral", messages=messages, response_format=City, tools=tools
        )
        assert answer.choices[0].message.parsed == LIMA
    with of_declared.chat.completions.stream(model="mistral", messages=messages, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == LIMA


def test_check_compares_the_running_backends_with_the_presets(
    backends: EmbeddedTriton, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--triton", backends.grpc_url, "--format", "json"]) == 0
    found = {(each["model"], each["code"]): each["text"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert {model for model, _ in found} == {"tensorrt_llm", "tensorrt_llm_api"}, "the stand-in of vLLM is complete"
    assert "'num_input_tokens'" in found["tensorrt_llm", "preset-mismatch"]
    assert found["tensorrt_llm", "split-characters"].endswith("set accumulate_tokens: true")
