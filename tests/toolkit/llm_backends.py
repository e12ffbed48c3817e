"""Stand-ins of the LLM backends in a real Triton, gateways over them, and pipelines with tools and reasoning."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.zoo.kinds import BY_NAME
from tests.zoo.repository import write_models

BACKENDS = ("vllm", "tensorrt_llm", "tensorrt_llm_api")
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    "pre_tokenizer": {"type": "Whitespace"},
}
"""Counts the words of a text."""


def write_backends(repository: Path) -> None:
    write_models(repository, [BY_NAME[name] for name in (*BACKENDS, "vllm_embeddings")])


def live_llms() -> Any:
    """A fixture of a module: a gateway without gateway.yaml in front of the fixture ``backends``."""

    @pytest.fixture(scope="module")
    def llms(backends: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
        folder = tmp_path_factory.mktemp("llms")
        for name in BACKENDS:
            tokenizer = folder / "tokenizers" / name
            tokenizer.mkdir(parents=True)
            (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
            (tokenizer / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        settings = {"triton_url": backends.grpc_url, "tokenizers": str(folder / "tokenizers")}
        with running_gateway(folder / "gateway", **settings) as gateway:
            yield gateway

    return llms


def text_of_triton(gateway: GatewayProcess, name: str, prompt: str) -> str:
    """The text that the stand-in writes, read from Triton's own protocol."""
    fields = {
        "vllm": {"stream": True, "exclude_input_in_output": True},
        "tensorrt_llm": {"max_tokens": 1024, "stream": False},
        "tensorrt_llm_api": {"sampling_param_max_tokens": 1024, "streaming": False},
    }[name]
    answer = httpx.post(f"{gateway.url}/v2/models/{name}/generate_stream", json={"text_input": prompt, **fields})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return "".join(each["text_output"] for each in events)


EMBED = {"embed": {"model": "vllm_embeddings", "preset": "vllm_embeddings"}}
TOOL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.tool_calls %}<called {{ message.tool_calls[0].function.arguments.city }}>{% endif %}"
    "{{ message.content }}{% endfor %}"
)
TOOL_PIPELINES = {
    name: {
        "model": "vllm",
        "preset": "vllm",
        "openai": {"chat": {"template_text": TOOL_TEMPLATE}, "tools": name, "reasoning": reasoning},
    }
    for name, reasoning in (("hermes", "qwen3"), ("mistral", "none"), ("gpt_oss", "gpt_oss"))
}
TOOL_TEXTS = {
    "hermes": "<think>Hm.</think>\nWait.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call>',
    "mistral": 'Wait.[TOOL_CALLS]weather[ARGS]{"city": "Z\u00fcrich"}',
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Z\u00fcrich"}',
}
"""What each model writes to say "Wait." and call ``weather`` with ``{"city": "Z\u00fcrich"}``."""
