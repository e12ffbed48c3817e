"""Unmodified clients over the stand-ins of the LLM backends, without a ``gateway.yaml``."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.clients.conftest import Outcomes, outcomes_in_node
from tests.conftest import Require
from tests.toolkit.environments import locked_environment
from tests.toolkit.llm_backends import (
    BACKENDS,
    TOKENIZER,
    running_backends,
    running_embeddings,
    running_llms,
    text_of_triton,
)
from tests.toolkit.processes import GatewayProcess

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with running_backends(tmp_path_factory.mktemp("backends"), models_venv) as triton:
        yield triton


@pytest.fixture(scope="module")
def llms(backends: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_llms(tmp_path_factory.mktemp("llms"), backends) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def in_node(llms: GatewayProcess, require: Require) -> Outcomes:
    """By client and model."""
    return outcomes_in_node(require, "call.mjs", llms.url, *BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("client", ["openai", "aiSdk"])
def test_each_client_reads_the_answer_the_usage_and_an_error(
    in_node: Outcomes, client: str, llms: GatewayProcess, backend: str
) -> None:
    found, text = in_node[client][backend], text_of_triton(llms, backend, "<user>Hi")
    assert (found["answer"], found["stream"]) == (text, text)
    assert min(found["usage"]["input_tokens"], found["usage"]["output_tokens"]) > 0
    assert found["wrong"]["status"] == 400
    assert any(field in found["wrong"]["message"] for field in ("max_tokens", "max_completion_tokens", "top_p"))


class TestAiperf:
    """NVIDIA's benchmark client of such servers."""

    REQUESTS = 16

    def run(self, url: str, model: str, folder: Path, require: Require, kind: str, *options: str) -> Any:
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        (tokenizer / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"added_tokens": []}))
        (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        command = [
            str(locked_environment("aiperf", require) / "aiperf"),
            *("profile", "-m", model, "--endpoint-type", kind, "--url", url),
            *("--tokenizer", str(tokenizer), "--request-count", str(self.REQUESTS), "--concurrency", "4"),
            *("--artifact-dir", str(folder / "artifacts"), "--ui", "none", "--isl", "16", *options),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        (export,) = (folder / "artifacts").rglob("profile_export_aiperf.json")
        return json.loads(export.read_text())

    def test_every_request_is_answered(self, llms: GatewayProcess, tmp_path: Path, require: Require) -> None:
        options = ("--extra-inputs", "ignore_eos:true", "--osl", "8", "--streaming")
        self.check(self.run(llms.url, "vllm", tmp_path, require, "chat", *options))

    def test_every_text_has_a_vector(self, backends: EmbeddedTriton, tmp_path: Path, require: Require) -> None:
        with running_embeddings(tmp_path / "embeddings", backends) as gateway:
            self.check(self.run(gateway.url, "embed", tmp_path, require, "embeddings"))

    def check(self, found: Any) -> None:
        assert found["request_count"]["avg"] == self.REQUESTS
        assert not found.get("error_summary")
