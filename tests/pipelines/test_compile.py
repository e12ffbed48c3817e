"""Compiling a pipeline derives omitted values and reports mismatches with the model by key."""

from typing import Any

import pytest

from app.core.model import ModelConfig
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.resolve import derived_spec
from tests.toolkit.models import ensemble, model, pipeline

CONFIG = model(["X FP32 [2]", "NOTE BYTES [1] optional"], ["Y FP32 [2]", "TEXT BYTES [1]"])


def mismatch(config: ModelConfig = CONFIG, **keys: Any) -> PipelineMismatch:
    with pytest.raises(PipelineMismatch) as caught:
        pipeline(config, **keys)
    return caught.value


def test_undeclared_fields_are_derived() -> None:
    p = pipeline(CONFIG)
    assert [(field.name, field.spec.kind, field.is_required) for field in p.inputs] == [
        ("X", "number", True),
        ("NOTE", "text", False),
    ]
    assert [(field.name, field.spec.kind) for field in p.outputs] == [("Y", "number"), ("TEXT", "text")]


def test_a_tensor_of_a_parameter_is_not_a_derived_input() -> None:
    p = pipeline(CONFIG, parameters={"note": {"type": "string", "tensor": "NOTE"}})
    assert [field.name for field in p.inputs] == ["X"]


def test_a_model_without_a_file_allows_streams() -> None:
    spec = derived_spec("m")
    assert spec.model == "m"
    assert spec.stream is not None


def test_timeout_s_overrides_the_default() -> None:
    assert pipeline(CONFIG).timeout_s == 30
    assert pipeline(CONFIG, timeout_s=2).timeout_s == 2


def test_rules_know_the_ensembles_of_the_graph() -> None:
    inner = ensemble("inner", CONFIG)
    p = pipeline(ensemble("outer", inner), inner, CONFIG)
    assert p.rules.ensembles == {"outer", "inner"}
    assert pipeline(CONFIG).rules.ensembles == frozenset()


@pytest.mark.parametrize(
    ("keys", "location", "text"),
    [
        ({"inputs": {"x": {"tensor": "Z"}}}, ("inputs", "x", "tensor"), "'Z' is not a tensor of the model"),
        ({"outputs": {"y": {"tensor": "TEX"}}}, ("outputs", "y", "tensor"), "did you mean 'TEXT'?"),
        (
            {"inputs": {"x": {"tensor": "X", "kind": "text"}}},
            ("inputs", "x", "kind"),
            "'text' does not fit FP32: leave `kind` out for a tensor of numbers",
        ),
        (
            {"outputs": {"t": {"tensor": "TEXT"}}},
            ("outputs", "t", "kind"),
            "is missing, and BYTES can be several: write `kind: text`, `image`, `binary` or `json`",
        ),
        ({"inputs": {}}, ("inputs",), "do not have 'X', which the model requires"),
        ({"inputs": {"a": {"tensor": "X"}, "b": {"tensor": "X"}}}, ("inputs",), "have 'X' twice"),
        (
            {"inputs": {"x": {"tensor": "X"}}, "parameters": {"n": {"type": "string", "tensor": "NOPE"}}},
            ("parameters", "n", "tensor"),
            "did you mean 'NOTE'?",
        ),
        (
            {"early_exit": [{"reason": "a", "missing": ["Z"]}]},
            ("early_exit", 0, "missing"),
            "'Z' is not a tensor of the model",
        ),
        (
            {"early_exit": [{"reason": "a", "empty": ["X"]}]},
            ("early_exit", 0, "empty"),
            "'X' is not a tensor of the model",
        ),
        ({"contract": {"Z": {"max_items": 1}}}, ("contract", "Z"), "'Z' is not a tensor of the model"),
        ({"contract": {"Y": {"max_items": "n"}}}, ("contract", "Y", "max_items"), "'n' is not an integer parameter"),
        ({"batch": True}, ("batch",), "no batch dimension"),
        ({"outputs": {"y": {"tensor": "Y", "single": True}}}, ("outputs", "y", "single"), "it needs [-1]"),
        (
            {"inputs": {"x": {"tensor": "X", "optional": True}}},
            ("inputs", "x", "optional"),
            "is true, and the model requires 'X': set a `default`, or `optional` in the model's config.pbtxt",
        ),
    ],
)
def test_mismatches_are_reported_with_their_key(
    keys: dict[str, Any], location: tuple[str | int, ...], text: str
) -> None:
    found = mismatch(**keys)
    assert found.location == location
    assert text in found.text


def test_an_optional_field_over_a_required_list_may_have_an_empty_default() -> None:
    config = model("IMAGES BYTES [-1]", "Y FP32 [2]")
    keys = {"tensor": "IMAGES", "kind": "image", "optional": True}
    assert "set `default: []`" in mismatch(config, inputs={"images": keys}).text
    request = pipeline(config, inputs={"images": {**keys, "default": []}}).request_of_json(b"{}")
    assert request.inputs[0].shape == (0,)


def test_an_optional_parameter_over_a_required_tensor_is_rejected() -> None:
    config = model("N INT32 [1]", "Y FP32 [2]")
    found = mismatch(config, parameters={"n": {"type": "integer", "tensor": "N", "optional": True}})
    assert (found.location, "requires 'N'" in found.text) == (("parameters", "n", "optional"), True)
    for keys in ({"default": 3, "optional": True}, {"send": 3}, {}):
        pipeline(config, parameters={"n": {"type": "integer", "tensor": "N", **keys}})


@pytest.mark.parametrize("kind", ["text", "image", "binary"])
def test_files_in_numbers_need_one_free_dimension(kind: str) -> None:
    for dims in ("[4]", "[-1,-1]", "[-1,3]"):
        found = mismatch(model(f"X UINT8 {dims}", "Y FP32 [2]"), inputs={"x": {"tensor": "X", "kind": kind}})
        assert found.text == f"'{kind}' does not fit UINT8 {dims}: a file or text needs the dims [-1]"
    (field,) = pipeline(model("X INT8 [-1]", "Y FP32 [2]"), inputs={"x": {"tensor": "X", "kind": kind}}).inputs
    assert (field.is_bare, field.tensor.dims) == (True, (-1,))


def test_files_in_numbers_cannot_be_items() -> None:
    config = model("X UINT8 [-1]", "Y FP32 [2]", max_batch_size=4)
    found = mismatch(config, inputs={"x": {"tensor": "X", "kind": "image"}}, batch=True)
    assert found.text == "is a file or text in UINT8: items of different sizes do not fit in one tensor"


def test_a_limit_must_be_a_request_parameter() -> None:
    keys: dict[str, Any] = {
        "parameters": {"n": {"type": "number"}, "k": {"type": "integer", "tensor": "K"}},
        "contract": {"Y": {"max_items": "k"}},
    }
    assert "is not an integer parameter" in mismatch(model("K INT32 [1]", "Y FP32 [-1]"), **keys).text


def test_signed_rules_need_the_key() -> None:
    rules = [{"reason": "a", "error": {"code": "any", "signed": True}}]
    with pytest.raises(PipelineMismatch, match="GATEWAY_EARLY_EXIT_KEY") as caught:
        pipeline(CONFIG, key=None, early_exit=rules)
    assert caught.value.location == ("early_exit", 0, "error", "signed")
    assert pipeline(CONFIG, early_exit=rules).rules


def test_a_datatype_without_a_json_form_is_a_mismatch() -> None:
    assert "datatype INVALID" in mismatch(model("X INVALID [1]")).text


def test_a_parameter_named_like_a_derived_input_is_rejected() -> None:
    with pytest.raises(PipelineMismatch, match="has the same name as an input of the model") as caught:
        pipeline(model("X FP32 [1]", "Y FP32 [1]"), inputs=None, parameters={"X": {"type": "integer"}})
    assert caught.value.location == ("parameters", "X")


def test_a_tensor_with_an_invalid_field_name_is_rejected() -> None:
    with pytest.raises(PipelineMismatch) as caught:
        pipeline(model('X" FP32 [1]', "Y FP32 [1]"), inputs=None)
    assert caught.value.location == ("inputs",)
