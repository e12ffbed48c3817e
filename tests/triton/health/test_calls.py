"""What the end of a call says about its model."""

import math
import time

import pytest

from app.core.engine import NO_OBSERVER
from app.core.errors import DeadlineExceeded
from app.core.inference import InferenceRequest, InferenceResponse
from app.triton import triton_engine as module
from app.triton.health import health as health_module
from app.triton.health.health import FAILURES, SILENCE_S, CallHistory, ModelDeclaration, ModelHealth, TritonHealth
from app.triton.triton_engine import WatchedCall

REQUEST = InferenceRequest("m", ())
METHOD = "ModelInfer"
RESPONSE = InferenceResponse({})


@pytest.fixture
def health() -> TritonHealth:
    return TritonHealth()


def called(health: TritonHealth, method: str = METHOD, timeout_s: float = math.inf) -> WatchedCall:
    return WatchedCall(REQUEST, method, timeout_s, NO_OBSERVER, health)


@pytest.mark.parametrize(
    ("code", "has_response", "silence_s", "unanswered"),
    [
        ("DEADLINE_EXCEEDED", False, SILENCE_S, 1),
        *[(code, False, SILENCE_S, 0) for code in ("CANCELLED", "UNAVAILABLE", "INTERNAL", "OK", "UNKNOWN")],
        ("DEADLINE_EXCEEDED", True, SILENCE_S, 0),
        ("DEADLINE_EXCEEDED", True, 0.0, 1),
        ("CANCELLED", True, 0.0, 1),
        ("UNAVAILABLE", True, 0.0, 0),
    ],
)
def test_a_call_is_unanswered_after_a_timeout_or_a_long_silence(
    monkeypatch: pytest.MonkeyPatch, code: str, has_response: bool, silence_s: float, unanswered: int
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", silence_s)
    health = TritonHealth()
    call = called(health)
    if has_response:
        call.response(RESPONSE)
    call.ended(code, None)
    assert health.calls_of("m", METHOD).unanswered == unanswered


def test_a_response_resets_the_count_of_its_method(health: TritonHealth) -> None:
    for method in (METHOD, "ModelStreamInfer"):
        for _ in range(3):
            called(health, method).ended("DEADLINE_EXCEEDED", None)
        assert health.calls_of("m", method).unanswered == 3
    called(health).response(RESPONSE)
    assert [health.calls_of("m", method).unanswered for method in (METHOD, "ModelStreamInfer")] == [0, 3]


@pytest.mark.parametrize(("together_s", "answers"), [(60.0, 1), (0.0, 3)])
def test_responses_that_arrive_together_are_one_answer(
    health: TritonHealth, monkeypatch: pytest.MonkeyPatch, together_s: float, answers: int
) -> None:
    monkeypatch.setattr(module, "_TOGETHER_S", together_s)
    call, heard_at = called(health), set[float]()
    for _ in range(3):
        call.response(RESPONSE)
        heard_at.add(health.models["m"].heard_at)
    assert len(heard_at) == answers


def test_the_timeout_of_a_canary_follows_the_longest_wait(health: TritonHealth) -> None:
    model = health.models["m"]
    assert (model.heard_at, model.canary_s) == (0.0, health_module.SILENCE_S)
    for waited_s in (40.0, 0.1):
        health.calls_of("m", METHOD).answered(waited_s, time.monotonic())
    assert model.heard_at
    assert model.canary_s == 120.0


def test_a_deadline_that_a_busy_gateway_noticed_late_does_not_open_the_breaker(
    health: TritonHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for _ in range(2 * FAILURES):
        call = called(health, timeout_s=0.1)
        now[0] += 30.0
        call.ended("DEADLINE_EXCEEDED", DeadlineExceeded("The deadline passed."))
    assert not health.faults


@pytest.mark.parametrize(
    ("waits", "silent_s"),
    [([(0, 10)], 10), ([(0, 10), (2, 11), (5, 6)], 11), ([(0, 10), (100, 110)], 20)],
    ids=["one", "waits at the same time count once", "time without calls does not count"],
)
def test_how_long_a_model_was_silent(waits: list[tuple[float, float]], silent_s: float) -> None:
    calls = CallHistory(ModelHealth())
    for began, ended in waits:
        calls.went_unanswered(began, ended)
    assert calls.silent_s == silent_s


def test_an_answer_ends_the_silence() -> None:
    health = TritonHealth(lambda _: ModelDeclaration(first_output_s=3600))
    calls = health.calls_of("m", METHOD)
    calls.went_unanswered(0.0, 10.0)
    assert health.may_be_busy("m", calls)
    calls.answered(0.1, 11.0)
    assert not health.may_be_busy("m", calls)
