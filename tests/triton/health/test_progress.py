"""Calls that count as unanswered."""

import pytest

from app.core.errors import DeadlineExceeded
from app.core.inference import InferenceRequest, InferenceResponse
from app.triton.health import health as module
from app.triton.health.health import FAILURES, SILENCE_S, Progress

REQUEST = InferenceRequest("m", ())
METHOD = "ModelInfer"


@pytest.mark.parametrize(
    ("code", "unanswered"),
    [("DEADLINE_EXCEEDED", 1), ("CANCELLED", 0), ("UNAVAILABLE", 0), ("INTERNAL", 0), ("OK", 0), ("UNKNOWN", 0)],
)
def test_a_short_call_is_unanswered_only_after_a_timeout(code: str, unanswered: int) -> None:
    progress = Progress()
    progress.started(REQUEST, METHOD).ended(code, None)
    assert progress.unanswered[METHOD] == unanswered


@pytest.mark.parametrize(("code", "unanswered"), [("CANCELLED", 1), ("DEADLINE_EXCEEDED", 1), ("UNAVAILABLE", 0)])
def test_a_long_silence_before_the_end_is_unanswered(
    monkeypatch: pytest.MonkeyPatch, code: str, unanswered: int
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.0)
    progress = Progress()
    call = progress.started(REQUEST, METHOD)
    call.response(InferenceResponse({}))
    call.ended(code, None)
    assert progress.unanswered[METHOD] == unanswered


def test_a_response_resets_the_count() -> None:
    progress = Progress()
    for _ in range(3):
        progress.started(REQUEST, METHOD).ended("DEADLINE_EXCEEDED", None)
    assert progress.unanswered[METHOD] == 3
    progress.started(REQUEST, METHOD).response(InferenceResponse({}))
    assert progress.unanswered[METHOD] == 0


@pytest.mark.parametrize(("together_s", "answers"), [(60.0, 1), (0.0, 3)])
def test_responses_that_arrive_together_are_one_answer(
    monkeypatch: pytest.MonkeyPatch, together_s: float, answers: int
) -> None:
    monkeypatch.setattr(module, "_TOGETHER_S", together_s)
    progress = Progress()
    call = progress.started(REQUEST, METHOD)
    for _ in range(3):
        call.response(InferenceResponse({}))
    assert progress.answers[METHOD] == answers


def test_a_deadline_in_an_active_stream_is_not_unanswered() -> None:
    progress = Progress()
    call = progress.started(REQUEST, METHOD)
    call.response(InferenceResponse({}))
    call.ended("DEADLINE_EXCEEDED", None)
    assert progress.unanswered[METHOD] == 0


def test_methods_are_counted_separately() -> None:
    progress = Progress()
    progress.started(REQUEST, "ModelStreamInfer").ended("DEADLINE_EXCEEDED", None)
    progress.started(REQUEST, METHOD).response(InferenceResponse({}))
    assert progress.unanswered["ModelStreamInfer"] == 1


def test_the_timeout_of_a_probe_follows_the_longest_wait() -> None:
    progress = Progress()
    assert not progress.has_answered("m")
    assert progress.timeout_s("m") == SILENCE_S
    progress.answered("m", METHOD, 40.0)
    progress.answered("m", METHOD, 0.1)
    assert progress.has_answered("m")
    assert progress.timeout_s("m") == 120.0


def test_a_deadline_that_a_busy_gateway_noticed_late_does_not_open_the_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, now = Progress(), [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for _ in range(2 * FAILURES):
        call = progress.started(REQUEST, METHOD, timeout_s=0.1)
        now[0] += 30.0
        call.ended("DEADLINE_EXCEEDED", DeadlineExceeded("The deadline passed."))
    assert not progress.breakers.open
