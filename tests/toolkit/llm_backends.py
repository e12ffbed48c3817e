"""Stand-ins of the LLM backends in a real Triton, and a gateway over them without a ``gateway.yaml``."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton
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


@contextmanager
def running_backends(repository: Path, models_venv: Path) -> Iterator[EmbeddedTriton]:
    write_models(repository, [BY_NAME[name] for name in (*BACKENDS, "vllm_embeddings")])
    with running_triton(EmbeddedOptions(repository, models_venv)) as triton:
        yield triton


@contextmanager
def running_llms(folder: Path, backends: EmbeddedTriton) -> Iterator[GatewayProcess]:
    """``folder``: gets a tokenizer folder for each backend."""
    for name in BACKENDS:
        tokenizer = folder / "tokenizers" / name
        tokenizer.mkdir(parents=True)
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        (tokenizer / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    settings = {"triton_url": backends.grpc_url, "tokenizers": str(folder / "tokenizers")}
    with running_gateway(folder / "gateway", **settings) as gateway:
        yield gateway


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


@contextmanager
def running_embeddings(folder: Path, backends: EmbeddedTriton) -> Iterator[GatewayProcess]:
    """A gateway whose pipeline ``embed`` has the preset ``vllm_embeddings``."""
    config = {"pipelines": {"embed": {"model": "vllm_embeddings", "preset": "vllm_embeddings"}}}
    folder.mkdir(exist_ok=True)
    (folder / "gateway.yaml").write_text(json.dumps(config))
    settings = {"triton_url": backends.grpc_url, "config": str(folder / "gateway.yaml")}
    with running_gateway(folder / "gateway", **settings) as gateway:
        yield gateway
