"""LangChain's classes for OpenAI and LiteLLM's provider `openai` get the same answers as from Triton."""

from typing import Any

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.clients.conftest import Outcomes, as_float32, error_of, outcomes_of
from tests.conftest import Require
from tests.live.side_by_side import triton_text, triton_vectors
from tests.toolkit.processes import GatewayProcess

pytestmark = pytest.mark.full

QUESTION = "User: What is a list?\nAssistant:"
"""The programs' question, rendered with the chat template of `write`."""
ERRORS: dict[str, dict[str, Any]] = {
    "langchain": {
        "unknown model": ("OpenAIModelNotFoundError", 404),
        "bad input": ("OpenAIInvalidRequestError", 400),
        "failed stream": ("APIError", None),
    },
    "litellm": {
        "unknown model": ("NotFoundError", 404),
        "bad input": ("BadRequestError", 400),
        "failed model": ("BadGatewayError", 502),
        "failed stream": ("MidStreamFallbackError", 500),
    },
}
"""The class and the status of each error, by client."""


@pytest.fixture(scope="module", params=ERRORS)
def client(
    request: pytest.FixtureRequest, gateway: GatewayProcess, require: Require, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Outcomes]:
    name: str = request.param
    notice = tmp_path_factory.mktemp(name) / "notice"
    return name, outcomes_of(require, name, f"{name}_calls.py", gateway.url, notice)


def test_texts_and_token_counts_equal_those_of_triton(client: tuple[str, Outcomes], triton: EmbeddedTriton) -> None:
    name, ours = client
    expected = triton_text(triton.http_url, QUESTION)
    if name == "litellm":
        expected["reason"] = "length"
    else:
        assert ours["asynchronous answer"] == expected
    assert (ours["answer"], ours["stream"]) == (expected, expected)
    assert ours["completion"] == triton_text(triton.http_url, "The for statement")["text"]


def test_vectors_equal_those_of_triton(client: tuple[str, Outcomes], triton: EmbeddedTriton) -> None:
    assert as_float32(client[1]["vectors"]) == triton_vectors(triton.http_url, "A cat sleeps.", "Ein Hund")


def test_errors_raise_the_matching_class(client: tuple[str, Outcomes]) -> None:
    name, ours = client
    assert {call: error_of(ours[call]) for call in ERRORS[name]} == ERRORS[name]


def test_a_disconnect_cancels_the_model(client: tuple[str, Outcomes]) -> None:
    assert 3 <= client[1]["left"] < 30
