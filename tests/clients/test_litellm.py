"""LiteLLM: its provider `openai`, and its provider `triton` with the same calls to Triton's own HTTP endpoint."""

from pathlib import Path

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.clients.conftest import QUESTION, Outcomes, RunProgram, as_float32, error_of
from tests.conftest import Require
from tests.live.side_by_side import triton_text, triton_vectors
from tests.toolkit.environments import locked_environment
from tests.toolkit.processes import GatewayProcess

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def litellm(require: Require) -> Path:
    return locked_environment("litellm", require) / "python3"


class TestOpenAI:
    @pytest.fixture(scope="class")
    @classmethod
    def ours(cls, litellm: Path, gateway: GatewayProcess, notice: Path, run_program: RunProgram) -> Outcomes:
        return run_program(litellm, "litellm_openai.py", gateway.url, notice)

    def test_texts_and_token_counts_equal_those_of_triton(self, ours: Outcomes, triton: EmbeddedTriton) -> None:
        expected = triton_text(triton.http_url, QUESTION) | {"reason": "length"}
        assert ours["answer"] == expected
        assert ours["stream"] == expected
        assert ours["completion"] == triton_text(triton.http_url, "The for statement")["text"]

    def test_vectors_equal_those_of_triton(self, ours: Outcomes, triton: EmbeddedTriton) -> None:
        assert as_float32(ours["vectors"]) == triton_vectors(triton.http_url, "A cat sleeps.", "Ein Hund")

    def test_errors_raise_the_matching_class(self, ours: Outcomes) -> None:
        assert error_of(ours["unknown model"]) == ("NotFoundError", 404)
        assert error_of(ours["bad input"]) == ("BadRequestError", 400)
        assert error_of(ours["failed model"]) == ("BadGatewayError", 502)
        assert error_of(ours["failed stream"]) == ("MidStreamFallbackError", 500)

    def test_a_disconnect_cancels_the_model(self, ours: Outcomes) -> None:
        assert 3 <= ours["left"] < 30


class TestTriton:
    @pytest.fixture(scope="class")
    @classmethod
    def ours(cls, litellm: Path, gateway: GatewayProcess, notice: Path, run_program: RunProgram) -> Outcomes:
        return run_program(litellm, "litellm_triton.py", gateway.url, notice)

    @pytest.fixture(scope="class")
    @classmethod
    def theirs(cls, litellm: Path, triton: EmbeddedTriton, notice: Path, run_program: RunProgram) -> Outcomes:
        return run_program(litellm, "litellm_triton.py", triton.http_url, notice)

    def test_answers_equal_those_of_triton(self, ours: Outcomes, theirs: Outcomes) -> None:
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

    def test_characters_split_between_responses_are_joined(self, ours: Outcomes, theirs: Outcomes) -> None:
        assert theirs["split character"] == ["a", *["\ufffd"] * 4, "b"]
        assert ours["split character"] == ["a", "😀", "b"]

    def test_infer_of_a_decoupled_model_is_answered(self, ours: Outcomes, theirs: Outcomes) -> None:
        assert (error_of(theirs["infer"]), ours["infer"]) == (("APIError", 501), "ä")

    def test_a_number_out_of_range_is_400_but_wraps_in_triton(self, ours: Outcomes, theirs: Outcomes) -> None:
        assert theirs["number out of range"] == "word "
        assert error_of(ours["number out of range"]) == ("BadRequestError", 400)

    def test_errors_of_the_caller_are_400(self, ours: Outcomes, theirs: Outcomes) -> None:
        """With Triton, LiteLLM raises classes that it retries. Triton answers the first call with 200."""
        for call, error in (
            ("many responses", "APIConnectionError"),
            ("one text instead of a list", "InternalServerError"),
        ):
            assert theirs[call]["error"] == error
            assert error_of(ours[call]) == ("BadRequestError", 400)

    def test_a_disconnect_cancels_the_model(self, ours: Outcomes) -> None:
        assert 3 <= ours["left"] < 30
