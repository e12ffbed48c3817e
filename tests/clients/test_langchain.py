"""LangChain's classes for OpenAI get the same answers as from Triton."""

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.clients.conftest import QUESTION, Outcomes, RunProgram, as_float32, error_of
from tests.conftest import Require
from tests.live.side_by_side import triton_text, triton_vectors
from tests.toolkit.environments import locked_environment
from tests.toolkit.processes import GatewayProcess

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def ours(
    gateway: GatewayProcess, require: Require, tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Outcomes:
    python = locked_environment("langchain", require) / "python3"
    return run_program(python, "langchain_calls.py", gateway.url, tmp_path_factory.mktemp("langchain") / "notice")


def test_texts_and_token_counts_equal_those_of_triton(ours: Outcomes, triton: EmbeddedTriton) -> None:
    expected = triton_text(triton.http_url, QUESTION)
    assert [ours[call] for call in ("answer", "asynchronous answer", "stream")] == [expected] * 3
    assert ours["completion"] == triton_text(triton.http_url, "The for")["text"]


def test_vectors_equal_those_of_triton(ours: Outcomes, triton: EmbeddedTriton) -> None:
    assert as_float32(ours["vectors"]) == triton_vectors(triton.http_url, "A cat sleeps.", "Ein Hund")


def test_errors_raise_the_matching_class(ours: Outcomes) -> None:
    assert error_of(ours["unknown model"]) == ("OpenAIModelNotFoundError", 404)
    assert error_of(ours["bad input"]) == ("OpenAIInvalidRequestError", 400)
    assert error_of(ours["failed stream"]) == ("APIError", None)


def test_a_disconnect_cancels_the_model(ours: Outcomes) -> None:
    assert 3 <= ours["left"] < 30
