"""Clients of the reference models get the same answers from the gateway as from Triton.

KServe's REST client and LiteLLM's provider `triton` send the same calls to Triton's HTTP endpoint; LangChain's classes
for OpenAI, LiteLLM's provider `openai` and OpenAI's JavaScript client are compared with the text and the vectors of
Triton.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.clients.conftest import Outcomes, as_float32, error_of, outcomes_in_node, outcomes_of
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.side_by_side import triton_text, triton_vectors
from tests.toolkit.environments import locked_environment
from tests.toolkit.processes import GatewayProcess, executions
from tests.toolkit.programs import output_of
from tests.toolkit.waiting import eventually

pytestmark = pytest.mark.full


class Sides(NamedTuple):
    """``notice``: the file that a model of ``ours`` writes when it is cancelled."""

    ours: Outcomes
    theirs: Outcomes
    notice: Path


@pytest.fixture(scope="module")
def sides_of(
    triton: EmbeddedTriton, gateway: GatewayProcess, require: Require, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Sides]:
    def run(environment: str, program: str) -> Sides:
        folder = tmp_path_factory.mktemp(environment)
        theirs = outcomes_of(require, environment, program, triton.http_url, folder / "of-triton")
        ours = outcomes_of(require, environment, program, gateway.url, folder / "notice")
        return Sides(ours, theirs, folder / "notice")

    return run


class TestKserve:
    @pytest.fixture(scope="class")
    @classmethod
    def sides(cls, sides_of: Callable[[str, str], Sides]) -> Sides:
        return sides_of("kserve", "kserve_calls.py")

    def test_answers_and_readiness_equal_those_of_triton(self, sides: Sides) -> None:
        for call in ("json", "binary", "binary in, json out", "vector"):
            assert "error" not in sides.theirs[call]
            assert sides.ours[call] == sides.theirs[call]
        for call, expected in (("model ready", True), ("unknown model ready", False)):
            assert sides.theirs[call] is sides.ours[call] is expected

    def test_health_works_where_the_client_fails_with_triton(self, sides: Sides) -> None:
        """Triton's answer has no body, but the client expects JSON."""
        for call in ("server live", "server ready"):
            assert (sides.theirs[call]["error"], sides.ours[call]) == ("JSONDecodeError", True)

    def test_errors_have_the_status_of_triton_and_a_message(self, sides: Sides) -> None:
        """The client shows no message of a model's error of Triton."""
        for call, status in (("unknown model", 404), ("wrong shape", 400), ("failed model", 500)):
            assert error_of(sides.ours[call]) == error_of(sides.theirs[call]) == ("HTTPStatusError", status)
            assert not sides.ours[call]["message"].startswith(", ")
            assert "secret" not in sides.ours[call]["message"]
        assert sides.theirs["failed model"]["message"].startswith(", ")

    def test_a_disconnect_cancels_the_model(self, sides: Sides) -> None:
        assert sides.ours["left"]["error"] == "ReadTimeout"
        eventually(lambda: sides.notice.exists() and sides.notice.read_text() != "")
        assert sides.notice.read_text().split()[1] == "0"

    def test_the_documented_program_runs(self, gateway: GatewayProcess, require: Require) -> None:
        blocks = blocks_of(ROOT / "docs" / "how-to" / "migration.md")
        (program,) = [text for language, text in blocks if language == "python" and "kserve" in text]
        code = program.replace("http://127.0.0.1:8080", gateway.url)
        assert output_of([locked_environment("kserve", require) / "python3", "-c", code]) == "True\n[1, 384]\n"


class TestLiteLLM:
    @pytest.fixture(scope="class")
    @classmethod
    def sides(cls, sides_of: Callable[[str, str], Sides]) -> Sides:
        return sides_of("litellm", "litellm_triton.py")

    def test_answers_equal_those_of_triton(self, sides: Sides) -> None:
        ours, theirs, _ = sides
        for call in ("generate", "generate_stream"):
            assert "error" not in theirs[call]
            assert ours[call] == theirs[call]
        assert as_float32(ours["vectors"]) == theirs["vectors"]
        for call, error in (
            ("unknown model", ("NotFoundError", 404)),
            ("unknown embedding model", ("NotFoundError", 404)),
            ("failed model", ("BadRequestError", 400)),
        ):
            assert error_of(ours[call]) == error_of(theirs[call]) == error
        assert ours["failed stream"] == theirs["failed stream"] == ["word ", "word "], "the provider ignores the error"

    def test_characters_split_between_responses_are_joined(self, sides: Sides) -> None:
        assert sides.theirs["split character"] == ["a", *["\ufffd"] * 4, "b"]
        assert sides.ours["split character"] == ["a", "😀", "b"]

    def test_infer_of_a_decoupled_model_is_answered(self, sides: Sides) -> None:
        assert (error_of(sides.theirs["infer"]), sides.ours["infer"]) == (("APIError", 501), "ä")

    def test_a_number_out_of_range_is_400_but_wraps_in_triton(self, sides: Sides) -> None:
        assert sides.theirs["number out of range"] == "word "
        assert error_of(sides.ours["number out of range"]) == ("BadRequestError", 400)

    def test_errors_of_the_caller_are_400(self, sides: Sides) -> None:
        """With Triton, LiteLLM raises classes that it retries. Triton answers the first call with 200."""
        for call, error in (
            ("many responses", "APIConnectionError"),
            ("one text instead of a list", "InternalServerError"),
        ):
            assert sides.theirs[call]["error"] == error
            assert error_of(sides.ours[call]) == ("BadRequestError", 400)

    def test_a_disconnect_cancels_the_model(self, sides: Sides) -> None:
        assert 3 <= sides.ours["left"] < 30


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


def test_the_javascript_client_of_openai(gateway: GatewayProcess, triton: EmbeddedTriton, require: Require) -> None:
    answers = outcomes_in_node(require, "openai.mjs", gateway.url)
    assert answers["models"] == ["write", "write_steps", "embed", "scripted_stream"]
    expected = triton_text(triton.http_url, "The for statement")["text"]
    assert answers["completion"]["choices"][0]["text"] == answers["chunks"]["text"] == expected
    assert answers["chunks"]["usage"] == answers["completion"]["usage"]
    assert answers["chat"]["choices"][0]["message"]["content"] == answers["chatChunks"]["text"]
    assert answers["chat"]["usage"] == answers["chatChunks"]["usage"]
    vectors = [item["embedding"] for item in answers["embeddings"]]
    assert as_float32(vectors) == triton_vectors(triton.http_url, "A cat.", "A dog.")
    assert answers["badField"] == {"class": "BadRequestError", "status": 400, "code": "invalid_input", "param": "n"}
    assert answers["badModel"]["class"] == "NotFoundError"
    assert answers["midStream"] == {"class": "APIError", "status": None, "code": "model_error", "param": None}
    assert answers["chunksBeforeDisconnect"] == 5
    time.sleep(0.5)
    after = executions(triton, "text_detokenize")
    time.sleep(0.3)
    assert executions(triton, "text_detokenize") == after, "the generator continues after the client disconnected"
