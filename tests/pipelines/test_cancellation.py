"""The call that cancels a step of an ensemble, because Triton does not cancel steps."""

import asyncio

import pytest

from app.core.errors import UpstreamUnavailable
from app.pipelines.run import Canceller
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model, pipeline

WITH_CANCEL = pipeline(model([], "Y FP32 [1]"), cancel={"model": "generator", "input": "CANCEL"})


async def test_the_cancel_model_gets_the_requests_id() -> None:
    engine = FakeEngine()
    canceller = Canceller(engine)
    request = WITH_CANCEL.request_of_json(b"{}")
    canceller.cancel(WITH_CANCEL, request)
    await canceller.close()
    (call,) = engine.requests
    assert call.model == "generator"
    assert [(tensor.name, tensor.array.tolist()) for tensor in call.inputs] == [
        ("CANCEL", [request.request_id.encode()])
    ]
    assert call.request_id != request.request_id


async def test_a_pipeline_without_cancel_calls_no_model() -> None:
    engine = FakeEngine()
    plain = pipeline(model([], "Y FP32 [1]"))
    canceller = Canceller(engine)
    canceller.cancel(plain, plain.request_of_json(b"{}"))
    await canceller.close()
    assert engine.requests == []


async def test_a_failed_cancel_call_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    canceller = Canceller(FakeEngine(answers=[UpstreamUnavailable("gone")]))
    canceller.cancel(WITH_CANCEL, WITH_CANCEL.request_of_json(b"{}"))
    await canceller.close()
    assert "cancel call to model 'generator' failed" in caplog.text


async def test_closing_waits_for_running_calls() -> None:
    engine = FakeEngine(answers=[0.02])
    canceller = Canceller(engine)
    canceller.cancel(WITH_CANCEL, WITH_CANCEL.request_of_json(b"{}"))
    await asyncio.sleep(0)
    await canceller.close()
    assert engine.closed == 1
