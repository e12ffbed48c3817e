"""The tensor log says what came over the wire, never a value, and changes nothing."""

import logging

import pytest

from app.domain.deadline import Deadline
from app.domain.inference import InferenceRequest
from app.observability.tensors import TensorLog
from tests.fakes.engine import FakeEngine
from tests.fakes.models import model, response, tensor

ANSWER = response(tensor("Y", "FP32", [41.5, 42.5]), tensor("T", "BYTES", [b"secret"]))
REQUEST = InferenceRequest("m", (), request_id="rid")


async def test_each_response_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = TensorLog(FakeEngine(answers=[ANSWER, ANSWER]))
    with caplog.at_level(logging.INFO, "triton_gateway.tensors"):
        assert [each async for each in engine.infer_stream(REQUEST, Deadline.after(20))] == [ANSWER, ANSWER]
        assert await engine.infer(REQUEST, Deadline.after(20)) is ANSWER
    said = [vars(record) for record in caplog.records]
    assert [line["response"] for line in said] == [1, 2, 1]
    assert {line["tensors"] for line in said} == {"Y:FP32[2] T:BYTES[1]"}
    assert {line["triton_request_id"] for line in said} == {"rid"}
    assert "secret" not in repr(said)


async def test_closing_it_closes_the_engine_behind_it() -> None:
    behind = FakeEngine(answers=[ANSWER, 3600.0])
    responses = TensorLog(behind).infer_stream(REQUEST, Deadline.after(20))
    await anext(responses)
    await responses.aclose()
    assert behind.closed == 1


async def test_the_rest_is_passed_on() -> None:
    config = model(name="m")
    engine = TensorLog(FakeEngine.of(config))
    assert await engine.is_live()
    assert [state.name for state in await engine.models()] == ["m"]
    assert await engine.model_ready("m")
    assert await engine.model_config("m") is config
