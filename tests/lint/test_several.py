"""The linter over several Tritons."""

import logging

import pytest

from app.check import log_findings
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model
from tests.triton.fleet.test_balancer import balanced


async def test_a_different_signature_at_one_triton_is_a_finding(caplog: pytest.LogCaptureFixture) -> None:
    usual, other = model("X FP32 [1]", "Y FP32 [1]", name="m"), model("X FP32 [2]", "Y FP32 [1]", name="m")
    balancer, _ = balanced(FakeEngine.of(usual), FakeEngine.of(other), FakeEngine.of(usual))
    with caplog.at_level(logging.ERROR):
        await log_findings(balancer, None)
    found = [record for record in caplog.records if getattr(record, "code", "") == "other-signature"]
    assert [(record.__dict__["model"], "triton-1:1" in record.message) for record in found] == [("m", True)]
