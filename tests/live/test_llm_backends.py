"""OpenAI's client over stand-ins with the tensors and habits of each LLM backend: texts, vectors, images, tools."""

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
from tests.llm.test_template import LLAVA
from tests.toolkit.image_host import GIF, PNG
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

CHATS = {"parts": {"template_text": LLAVA}, "texts": {"template_text": TEMPLATE, "image_marker": "<image>"}}
"""A template that takes parts, and one that takes texts."""
OF_IMAGES = {
    f"{name}-{form}": {"model": name, "preset": name, "openai": {"chat": chat}}
    for name in ("vllm", "tensorrt_llm_api")
    for form, chat in CHATS.items()
}
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


@pytest.fixture(scope="module")
def undeclared(llms: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{llms.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(declared: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{declared.url}/v1", api_key="none", max_retries=0) as found:
        yield found


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
def test_the_model_sees_the_images_in_their_order(client: OpenAI, model: str) -> None:
    """The stand-ins say the number of markers in the prompt, and the bytes of each image."""

    def image(content: bytes, media_type: str) -> dict[str, Any]:
        url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    first, second = {"type": "text", "text": "Compare "}, {"type": "text", "text": " and "}
    content = [first, image(PNG, "image/png"), second, image(GIF, "image/gif")]
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    answer = client.chat.completions.create(model=model, messages=messages)
    assert answer.choices[0].message.content == f"2: {PNG.hex()} {GIF.hex()}"
    stream = client.chat.completions.create(model=model, messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content


def asking(text: str) -> Any:
    return [{"role": "user", "content": f"Please write: {text}"}]


@pytest.mark.parametrize("name", TOOL_TEXTS)
def test_a_call_whole_and_added_up_by_the_clients_helper(client: OpenAI, name: str) -> None:
    messages = asking(TOOL_TEXTS[name])
    with client.chat.completions.stream(model=name, messages=messages, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    whole = client.chat.completions.create(model=name, messages=messages, tools=TOOLS).choices[0]
    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        message = choice.message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        found = (call.function.name, json.loads(call.function.arguments), message.content)
        assert found == ("weather", {"city": "Z\u00fcrich"}, "Wait.")
        assert (message.model_extra or {}).get("reasoning_content") == (None if name == "mistral" else "Hm.")


def test_the_clients_parse_returns_the_model(client: OpenAI) -> None:
    """The backend gets the schema, which names itself."""
    messages = asking(LIMA.model_dump_json())
    for tools in (openai.omit, TOOLS):
        answer = client.chat.completions.parse(model="mistral", messages=messages, response_format=City, tools=tools)
        assert answer.choices[0].message.parsed == LIMA
    with client.chat.completions.stream(model="mistral", messages=messages, response_format=City) as stream:
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
