"""A pipeline creates requests for its model and interprets the model's errors."""

import dataclasses
import time

import pytest
from pydantic import ValidationError

from app.core.errors import GatewayError, InvalidInput, InvalidRequest, ModelError, UpstreamError, UpstreamUnavailable
from app.core.inference import Deadline
from app.pipelines.pipeline import Pipeline
from tests.toolkit.models import ensemble, model, pipeline, refusal

CONFIG = model(["X FP32 [2]", "Y INT32 [1]"], ["Z FP32 [1]"])


def test_a_request_is_for_the_model_and_the_version() -> None:
    p = pipeline(CONFIG, version="3", parameters={"n": {"type": "integer"}})
    request = p.request_of_json(b'{"X": [1, 2], "Y": 3, "n": 4}')
    assert (request.model, request.version) == ("model", "3")
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs] == [
        ("X", "FP32", (2,)),
        ("Y", "INT32", (1,)),
    ]
    assert request.parameters == {"n": 4}


def test_every_request_has_a_random_id() -> None:
    p = pipeline(model([], "Z FP32 [1]"))
    ids = {p.request_of_json(b"{}").request_id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 32 for each in ids)


def test_all_problems_of_the_values_are_reported_together() -> None:
    with pytest.raises(InvalidInput) as caught:
        pipeline(model(["X FP32 [2]", "Y FP32 [3]"])).request_of_json(b'{"X": [1], "Y": []}')
    assert [found.field for found in caught.value.errors] == ["X", "Y"]


def test_a_pipeline_without_streams_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest):
        pipeline(CONFIG).stream_spec()
    assert pipeline(CONFIG, stream=True).stream_spec().progress_s == 30


def test_the_deadline_is_sent_as_the_declared_parameter() -> None:
    p = pipeline(CONFIG, deadline_parameter="until_ms", parameters={"n": {"type": "integer"}})
    request = p.request_of_json(b'{"X": [1, 2], "Y": 3, "n": 4}')
    before_ms = time.time() * 1000
    parameters = p.prepared(request, Deadline.after(10)).parameters
    assert parameters["n"] == 4
    assert before_ms + 9_000 < parameters["until_ms"] < before_ms + 20_000
    assert type(parameters["until_ms"]) is int
    assert pipeline(CONFIG).prepared(request, Deadline.after(10)) is request


@pytest.mark.parametrize("name", ["timeout", "triton_x", "n"])
def test_the_deadline_cannot_use_a_reserved_parameter(name: str) -> None:
    with pytest.raises(ValidationError, match="another parameter"):
        pipeline(CONFIG, deadline_parameter=name, parameters={"n": {"type": "integer"}})


class TestEarlyExitOfAnError:
    P = pipeline(CONFIG, early_exit=[{"reason": "no", "error": {"code": "ALREADY_EXISTS", "message": "EXIT"}}])

    def test_an_error_without_upstream_is_raised_unchanged(self) -> None:
        error = UpstreamUnavailable("gone")
        with pytest.raises(UpstreamUnavailable) as caught:
            self.P.early_exit_of(error, "rid")
        assert caught.value is error

    def test_the_right_message_with_the_wrong_code_gets_a_hint(self) -> None:
        with pytest.raises(ModelError) as caught:
            self.P.early_exit_of(refusal("EXIT", "INTERNAL"), "rid")
        assert "'no'" in (caught.value.hint or "")


class TestNameOfTheFailedStep:
    STEP = model("X FP32 [1]", "Z FP32 [1]", name="preprocess")
    P = pipeline(ensemble("whole", STEP), STEP)

    def failed(self, message: str, p: Pipeline | None = None) -> GatewayError:
        with pytest.raises(GatewayError) as caught:
            (p or self.P).early_exit_of(refusal(message, "INTERNAL"), "rid")
        return caught.value

    def test_the_error_names_a_step_that_names_itself(self) -> None:
        error = self.failed("in ensemble 'whole', preprocess: a user's secret")
        assert error.detail == "Step 'preprocess' failed."
        assert "list 'preprocess' under `rejects_input`" in (error.hint or "")
        assert "log has the model's message in the line with this request id" in (error.hint or "")
        assert "secret" not in f"{error.detail}{error.hint}"

    @pytest.mark.parametrize(
        "message", ["secret: no", "preprocess", "'preprocess': no", "in ensemble 'x', preprocess: no"]
    )
    def test_other_names_are_not_shown(self, message: str) -> None:
        error = self.failed(message)
        assert error.detail == "Model 'model' failed."
        assert "begins its message with its own name" in (error.hint or "")
        assert "secret" not in (error.hint or "")

    def test_a_plain_model_is_no_step_of_its_own_pipeline(self) -> None:
        plain = pipeline(model("X FP32 [1]", "Y FP32 [1]"))
        for message in ("broken", "model: broken"):
            assert self.failed(message, plain).detail == "Model 'model' failed."

    def test_the_message_is_shown_if_the_setting_allows_it(self) -> None:
        exposing = dataclasses.replace(self.P, exposes_errors=True)
        message = (
            "in ensemble 'whole', preprocess: no file\n/srv/models/x/1/model.py" + "\n\nAt:\n  /a/b.py(2): execute"
        )
        assert self.failed(message, exposing).detail == (
            "Step 'preprocess' failed. The model's message: preprocess: no file ..."
        )
        assert len(self.failed("x" * 9000, exposing).detail) < 400

    def test_invalid_input_keeps_the_message_for_the_log(self) -> None:
        p = pipeline(ensemble("whole", self.STEP), self.STEP, rejects_input=["preprocess"])
        with pytest.raises(InvalidInput) as caught:
            p.early_exit_of(refusal("preprocess: too long", "INVALID_ARGUMENT"), "rid")
        assert caught.value.upstream == UpstreamError("INVALID_ARGUMENT", "preprocess: too long")
