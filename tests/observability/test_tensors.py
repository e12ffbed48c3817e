"""The tensor log describes the tensors on the wire, but never contains values."""

import logging

import pytest

from app.core.inference import InferenceRequest
from app.observability.log import TensorLog
from tests.toolkit.models import response, tensor

RESPONSE = response(tensor("Y", "FP32", [41.5, 42.5]), tensor("T", "BYTES", [b"secret"]))
REQUEST = InferenceRequest("m", (), request_id="rid")


def test_each_response_is_logged_as_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log = TensorLog()
    with caplog.at_level(logging.INFO, "triton_gateway.tensors"):
        stream = log.started(REQUEST, "ModelStreamInfer")
        stream.response(RESPONSE)
        stream.response(RESPONSE)
        log.started(REQUEST, "ModelInfer").response(RESPONSE)
    lines = [vars(record) for record in caplog.records]
    assert [line["response"] for line in lines] == [1, 2, 1]
    assert {line["tensors"] for line in lines} == {"Y:FP32[2] T:BYTES[1]"}
    assert {line["triton_request_id"] for line in lines} == {"rid"}
    assert "secret" not in repr(lines)
