"""Converts ``config.pbtxt`` to the gateway's model configuration."""

import pytest

from app.core.model import Step, TensorSpec
from app.triton.config import model_config_of, parse_config

PLAIN = """
name: "plain" backend: "python" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] },
        { name: "NOTE" data_type: TYPE_STRING dims: 1 optional: true } ]
output [ { name: "Y" data_type: TYPE_BF16 dims: [ 2 ] } ]
model_transaction_policy { decoupled: true }
instance_group [ { count: 2 kind: KIND_CPU }, { kind: KIND_CPU } ]
parameters [ { key: "b" value { string_value: "2" } }, { key: "a" value { string_value: "1" } } ]
"""

ENSEMBLE = """
name: "whole" platform: "ensemble"
input [ { name: "X" data_type: TYPE_INT64 dims: [ 1 ] } ] output [ { name: "Y" data_type: TYPE_BOOL dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "first" model_version: -1 input_map { key: "A" value: "X" } output_map { key: "B" value: "between" } },
  { model_name: "second" model_version: 3 input_map { key: "C" value: "between" } output_map { key: "D" value: "Y" } }
] }
"""


def test_a_plain_model() -> None:
    config = model_config_of(parse_config(PLAIN))
    assert (config.name, config.backend, config.max_batch_size) == ("plain", "python", 8)
    assert config.inputs == (TensorSpec("X", "FP32", (-1, 4)), TensorSpec("NOTE", "BYTES", (1,), optional=True))
    assert config.outputs == (TensorSpec("Y", "BF16", (2,)),)
    assert config.decoupled
    assert not config.is_ensemble
    assert config.instance_count == 3
    assert config.parameters == (("a", "1"), ("b", "2"))


def test_an_ensemble() -> None:
    config = model_config_of(parse_config(ENSEMBLE))
    assert config.is_ensemble
    assert config.backend == "ensemble"
    assert config.steps == (
        Step("first", "", (("A", "X"),), (("B", "between"),)),
        Step("second", "3", (("C", "between"),), (("D", "Y"),)),
    )


def test_an_older_configuration_names_a_platform() -> None:
    assert model_config_of(parse_config('name: "m" platform: "onnxruntime_onnx"')).backend == "onnxruntime_onnx"


def test_one_instance_is_the_default() -> None:
    assert model_config_of(parse_config('name: "m"')).instance_count == 1


def test_a_tensor_is_found_by_its_name() -> None:
    config = model_config_of(parse_config(PLAIN))
    assert config.input("NOTE") == TensorSpec("NOTE", "BYTES", (1,), optional=True)
    assert config.output("X") is None


@pytest.mark.parametrize("text", ['name: "m', "nam: 1", "max_batch_size: x", "input { data_type: TYPE_FP7 }"])
def test_the_error_for_an_invalid_configuration_has_the_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^\d+:\d+"):
        parse_config(text)
