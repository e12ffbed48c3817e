"""Unmodified clients over the stand-ins of the LLM backends, also with tools and ``response_format``."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.clients.conftest import Outcomes, outcomes_in_node, outcomes_of
from tests.conftest import Require
from tests.toolkit.environments import locked_environment
from tests.toolkit.llm_backends import (
    BACKENDS,
    EMBED,
    TOKENIZER,
    TOOL_PIPELINES,
    TOOL_TEXTS,
    live_llms,
    text_of_triton,
    write_backends,
)
from tests.toolkit.processes import GatewayProcess, configured_gateway, live_gateway, live_triton
from tests.toolkit.programs import output_of

pytestmark = pytest.mark.full


backends, llms, tool_models = live_triton(write_backends), live_llms(), live_gateway(TOOL_PIPELINES, "backends")


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
        output_of(command, folder)
        (export,) = (folder / "artifacts").rglob("profile_export_aiperf.json")
        return json.loads(export.read_text())

    def test_every_request_is_answered(self, llms: GatewayProcess, tmp_path: Path, require: Require) -> None:
        options = ("--extra-inputs", "ignore_eos:true", "--osl", "8", "--streaming")
        self.check(self.run(llms.url, "vllm", tmp_path, require, "chat", *options))

    def test_every_text_has_a_vector(self, backends: EmbeddedTriton, tmp_path: Path, require: Require) -> None:
        with configured_gateway(backends, tmp_path / "embeddings", EMBED) as gateway:
            self.check(self.run(gateway.url, "embed", tmp_path, require, "embeddings"))

    def check(self, found: Any) -> None:
        assert found["request_count"]["avg"] == self.REQUESTS
        assert not found.get("error_summary")


CALL = {"text": "Wait.", "calls": [["weather", {"city": "Z\u00fcrich"}]]}


@pytest.fixture(scope="module")
def tools_in_node(tool_models: GatewayProcess, require: Require) -> Outcomes:
    return outcomes_in_node(require, "structured.mjs", tool_models.url, json.dumps(TOOL_TEXTS))


@pytest.mark.parametrize("model", TOOL_TEXTS)
@pytest.mark.parametrize("client", ["openai", "aiSdk"])
def test_a_call_an_object_and_a_mismatch_tools_in_node(tools_in_node: Outcomes, client: str, model: str) -> None:
    found = tools_in_node[client][model]
    assert (found["call"], found["callStream"]) == (CALL, CALL)
    assert (found["object"], found["objectStream"]) == ({"city": "Lima"}, {"city": "Lima"})
    assert found["mismatch"]["status"] == 502
    assert "The model's answer is not JSON" in found["mismatch"]["message"]


def test_pydantic_ai_returns_its_output_type(tool_models: GatewayProcess, require: Require) -> None:
    expected = {"object": {"city": "Lima"}, "byTool": {"city": "Lima"}}
    found = outcomes_of(require, "pydantic-ai", "pydantic_ai_tools.py", tool_models.url, json.dumps(TOOL_TEXTS))
    assert found == dict.fromkeys(TOOL_TEXTS, expected)


def test_langchain_calls_tools_whole_as_a_stream_with_a_result_and_forced(
    tool_models: GatewayProcess, require: Require
) -> None:
    expected = {
        "answer": CALL,
        "stream": CALL,
        "result": "<called Z\u00fcrich>Wait.31 degrees in Z\u00fcrich",
        "forced": {"text": "", "calls": [["weather", {"city": "Lima"}]]},
    }
    found = outcomes_of(require, "langchain", "langchain_tools.py", tool_models.url, json.dumps(TOOL_TEXTS))
    assert found == dict.fromkeys(TOOL_TEXTS, expected)
