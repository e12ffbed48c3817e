"""Clients in Node, LangChain and Pydantic AI use tools and ``response_format`` with each model."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Outcomes, RunProgram
from tests.conftest import Require
from tests.live.tool_models import TEXTS, running_tool_models
from tests.toolkit.environments import locked_environment, npm_environment
from tests.toolkit.processes import GatewayProcess

pytestmark = pytest.mark.full
CALL = {"text": "Wait.", "calls": [["weather", {"city": "Z\u00fcrich"}]]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[GatewayProcess]:
    with running_tool_models(tmp_path_factory.mktemp("tools"), models_venv) as running:
        yield running


@pytest.fixture(scope="module")
def outcomes_of(gateway: GatewayProcess, require: Require, run_program: RunProgram) -> Callable[[str, str], Outcomes]:
    def run(environment: str, program: str) -> Outcomes:
        python = locked_environment(environment, require) / "python3"
        return run_program(python, program, gateway.url, json.dumps(TEXTS))

    return run


@pytest.fixture(scope="module")
def in_node(gateway: GatewayProcess, require: Require) -> dict[str, Any]:
    folder = npm_environment("llm-clients", Path(__file__).with_name("npm_llm"), require)
    command = ["node", "structured.mjs", gateway.url, json.dumps(TEXTS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("model", TEXTS)
@pytest.mark.parametrize("client", ["openai", "aiSdk"])
def test_a_call_an_object_and_a_mismatch_in_node(in_node: dict[str, Any], client: str, model: str) -> None:
    found = in_node[client][model]
    assert (found["call"], found["callStream"]) == (CALL, CALL)
    assert (found["object"], found["objectStream"]) == ({"city": "Lima"}, {"city": "Lima"})
    assert found["mismatch"]["status"] == 502
    assert "The model's answer is not JSON" in found["mismatch"]["message"]


def test_pydantic_ai_returns_its_output_type(outcomes_of: Callable[[str, str], Outcomes]) -> None:
    expected = {"object": {"city": "Lima"}, "byTool": {"city": "Lima"}}
    assert outcomes_of("pydantic-ai", "pydantic_ai_tools.py") == dict.fromkeys(TEXTS, expected)


def test_langchain_calls_tools_whole_as_a_stream_with_a_result_and_forced(
    outcomes_of: Callable[[str, str], Outcomes],
) -> None:
    expected = {
        "answer": CALL,
        "stream": CALL,
        "result": "<called Z\u00fcrich>Wait.31 degrees in Z\u00fcrich",
        "forced": {"text": "", "calls": [["weather", {"city": "Lima"}]]},
    }
    assert outcomes_of("langchain", "langchain_tools.py") == dict.fromkeys(TEXTS, expected)
