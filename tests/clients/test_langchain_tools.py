"""LangChain's class for OpenAI calls tools with each model."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Outcomes, RunProgram
from tests.conftest import Require
from tests.live.tool_models import TEXTS, running_tool_models
from tests.toolkit.environments import locked_environment

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def ours(
    require: Require, tmp_path_factory: pytest.TempPathFactory, models_venv: Path, run_program: RunProgram
) -> Outcomes:
    python = locked_environment("langchain", require) / "python3"
    with running_tool_models(tmp_path_factory.mktemp("langchain_tools"), models_venv) as gateway:
        return run_program(python, "langchain_tools.py", gateway.url, json.dumps(TEXTS))


@pytest.mark.parametrize("model", TEXTS)
def test_a_call_whole_as_a_stream_with_its_result_and_forced(ours: Outcomes, model: str) -> None:
    expected = {"text": "Wait.", "calls": [["weather", {"city": "Z\u00fcrich"}]]}
    assert (ours[model]["answer"], ours[model]["stream"]) == (expected, expected)
    assert ours[model]["result"] == "<called Z\u00fcrich>Wait.31 degrees in Z\u00fcrich"
    assert ours[model]["forced"] == {"text": "", "calls": [["weather", {"city": "Lima"}]]}
