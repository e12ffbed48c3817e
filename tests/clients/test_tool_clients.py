"""Clients in Node, LangChain and Pydantic AI use tools and ``response_format`` with each model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import Outcomes, outcomes_in_node, outcomes_of
from tests.conftest import Require
from tests.toolkit.llm_backends import TOOL_TEXTS, running_tool_models
from tests.toolkit.processes import GatewayProcess

pytestmark = pytest.mark.full
CALL = {"text": "Wait.", "calls": [["weather", {"city": "Z\u00fcrich"}]]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[GatewayProcess]:
    with running_tool_models(tmp_path_factory.mktemp("tools"), models_venv) as running:
        yield running


@pytest.fixture(scope="module")
def in_node(gateway: GatewayProcess, require: Require) -> Outcomes:
    return outcomes_in_node(require, "structured.mjs", gateway.url, json.dumps(TOOL_TEXTS))


@pytest.mark.parametrize("model", TOOL_TEXTS)
@pytest.mark.parametrize("client", ["openai", "aiSdk"])
def test_a_call_an_object_and_a_mismatch_in_node(in_node: Outcomes, client: str, model: str) -> None:
    found = in_node[client][model]
    assert (found["call"], found["callStream"]) == (CALL, CALL)
    assert (found["object"], found["objectStream"]) == ({"city": "Lima"}, {"city": "Lima"})
    assert found["mismatch"]["status"] == 502
    assert "The model's answer is not JSON" in found["mismatch"]["message"]


def test_pydantic_ai_returns_its_output_type(gateway: GatewayProcess, require: Require) -> None:
    expected = {"object": {"city": "Lima"}, "byTool": {"city": "Lima"}}
    found = outcomes_of(require, "pydantic-ai", "pydantic_ai_tools.py", gateway.url, json.dumps(TOOL_TEXTS))
    assert found == dict.fromkeys(TOOL_TEXTS, expected)


def test_langchain_calls_tools_whole_as_a_stream_with_a_result_and_forced(
    gateway: GatewayProcess, require: Require
) -> None:
    expected = {
        "answer": CALL,
        "stream": CALL,
        "result": "<called Z\u00fcrich>Wait.31 degrees in Z\u00fcrich",
        "forced": {"text": "", "calls": [["weather", {"city": "Lima"}]]},
    }
    found = outcomes_of(require, "langchain", "langchain_tools.py", gateway.url, json.dumps(TOOL_TEXTS))
    assert found == dict.fromkeys(TOOL_TEXTS, expected)
