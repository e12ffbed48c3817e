"""The code samples in the documentation work as described."""

import sys
from types import SimpleNamespace

import pytest

from app.core.errors import UpstreamError
from app.pipelines.model_errors import EarlyExitRules
from app.pipelines.spec import EarlyExitRule, ErrorMatch
from tests.docs.pages import ROOT, blocks_of

KEY = "a key of sixteen bytes"
REQUEST = SimpleNamespace(request_id=lambda: "5d29")


class TritonError(Exception):
    """The part of the Python backend's error that the recipes use: a message and a code."""

    ALREADY_EXISTS = "ALREADY_EXISTS"

    def __init__(self, message: str, code: str) -> None:
        self.upstream = UpstreamError(code, f"in ensemble 'outer', {message}")


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The definitions in the Python blocks of docs/explanation/early-exit.md."""
    backend = SimpleNamespace(TritonError=TritonError, InferenceResponse=lambda error: error)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    monkeypatch.setenv("EARLY_EXIT_KEY", KEY)
    defined: dict[str, object] = {}
    for language, text in blocks_of(ROOT / "docs" / "explanation" / "early-exit.md"):
        if language == "python":
            exec(text, defined)
    return defined


def reason_of(match: ErrorMatch, error: TritonError, request_id: str = "5d29") -> str | None:
    rule = EarlyExitRule(reason="no_text", error=match)
    return EarlyExitRules((rule,), frozenset({"outer"}), KEY.encode()).reason_of_error(error.upstream, request_id)


def test_the_plain_exit_matches_its_rule(recipes: dict[str, object]) -> None:
    match = ErrorMatch(code="ALREADY_EXISTS", message="EARLY_EXIT[no_text]")
    assert reason_of(match, recipes["nothing_to_do"]("no_text")) == "no_text"  # type: ignore[operator]


def test_the_signed_exit_is_valid_for_its_own_request_only(recipes: dict[str, object]) -> None:
    signed = recipes["signed_exit"](REQUEST, "no_text")  # type: ignore[operator]
    match = ErrorMatch(code="any", signed=True)
    assert (reason_of(match, signed), reason_of(match, signed, "another")) == ("no_text", None)
