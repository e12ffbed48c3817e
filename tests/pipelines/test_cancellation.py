"""The call that cancels a step of an ensemble, because Triton does not cancel steps."""

import asyncio

import pytest

from app.core.errors import UpstreamUnavailable
from app.core.inference import InferenceRequest
from app.pipelines.run import Canceller
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model, pipeline

PLAIN = pipeline(model([], "Y FP32 [1]"))
WITH_CANCEL = pipeline(model([], "Y FP32 [1]"), cancel={"model": "generator", "input": "CANCEL"})
REQUEST = WITH_CANCEL.request_of_json(b"{}")


async def calls_of(engine: FakeEngine, p=WITH_CANCEL) -> list[InferenceRequest]:
    """The calls for an abandoned request, after their end."""
    canceller = Canceller(engine)
    canceller.cancel(p, REQUEST)
    await asyncio.sleep(0)
    await canceller.close()
    return engine.requests


async def test_the_cancel_model_gets_the_requests_id() -> None:
    (call,) = await calls_of(FakeEngine())
    assert (call.model, [(each.name, each.array.tolist()) for each in call.inputs]) == (
        "generator",
        [("CANCEL", [REQUEST.request_id.encode()])],
    )
    assert call.request_id != REQUEST.request_id
    assert await calls_of(FakeEngine(), PLAIN) == []


async def test_a_failed_call_is_only_logged_and_closing_waits_for_a_slow_one(caplog: pytest.LogCaptureFixture) -> None:
    await calls_of(FakeEngine(answers=[UpstreamUnavailable("gone")]))
    assert "cancel call to model 'generator' failed" in caplog.text
    await calls_of(slow := FakeEngine(answers=[0.02]))
    assert slow.closed == 1
