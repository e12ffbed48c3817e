"""Pipelines with tools and reasoning over a stand-in of vLLM that writes what the prompt asks for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.launcher.launch import EmbeddedOptions
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton
from tests.zoo.kinds import BY_NAME
from tests.zoo.repository import write_models

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.tool_calls %}<called {{ message.tool_calls[0].function.arguments.city }}>{% endif %}"
    "{{ message.content }}{% endfor %}"
)
CONFIG = {
    "pipelines": {
        name: {
            "model": "vllm",
            "preset": "vllm",
            "openai": {"chat": {"template_text": TEMPLATE}, "tools": name, "reasoning": reasoning},
        }
        for name, reasoning in (("hermes", "qwen3"), ("mistral", "none"), ("gpt_oss", "gpt_oss"))
    }
}
TEXTS = {
    "hermes": "<think>Hm.</think>\nWait.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call>',
    "mistral": 'Wait.[TOOL_CALLS]weather[ARGS]{"city": "Z\u00fcrich"}',
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Z\u00fcrich"}',
}
"""What each model writes to say "Wait." and call ``weather`` with ``{"city": "Z\u00fcrich"}``."""


@contextmanager
def running_tool_models(folder: Path, models_venv: Path) -> Iterator[GatewayProcess]:
    write_models(folder / "models", [BY_NAME["vllm"]])
    (folder / "gateway.yaml").write_text(json.dumps(CONFIG))
    with (
        running_triton(EmbeddedOptions(folder / "models", models_venv)) as triton,
        running_gateway(folder / "gateway", triton_url=triton.grpc_url, config=str(folder / "gateway.yaml")) as gateway,
    ):
        yield gateway
