"""Declarations are checked, and compiled against their models."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.admission.admission import WHOLE, Share
from app.api.sessions.open_sessions import new_sequence_id, terms_of
from app.config.document import Section
from app.config.mismatch import PipelineMismatch
from app.core.errors import InvalidRequest
from app.core.model import ModelConfig, SequenceBatching, sequence_ids_of
from app.pipelines.file import derived_spec
from app.pipelines.spec import (
    ContractSpec,
    EarlyExitRule,
    ErrorMatch,
    InputSpec,
    OutputSpec,
    ParameterSpec,
    PipelineSpec,
    RefusalRule,
    StreamSpec,
)
from app.sessions.session import OWN_NUMBERS, OWN_SHORT_NUMBERS, OWN_TEXT
from tests.toolkit.models import ensemble, model, pipeline


def test_the_defaults() -> None:
    spec, stream = PipelineSpec(model="m"), StreamSpec()
    assert (spec.stream, spec.batch, spec.idempotent, spec.warmup) == (None, None, False, True)
    assert (spec.early_exit, spec.readiness, spec.examples) == ([], "required", {})
    assert (stream.progress_s, stream.timeout_s, stream.commit_s, stream.longest_first_s) == (30, 600, 5, 30)
    assert StreamSpec(progress_s=7, first_output_s=300).longest_first_s == 300
    for value, expected in ((True, stream), (None, stream), ({}, stream), (False, None)):
        assert PipelineSpec.model_validate({"model": "m", "stream": value}).stream == expected


def test_values_are_kept_as_written() -> None:
    assert InputSpec(tensor="X", maximum=2**53 + 1).maximum == 2**53 + 1
    assert ContractSpec(max_items=0).max_items == 0
    examples: dict[str, Any] = {"dark-1": {"x": [1, None]}, "a" * 64: {}}
    assert PipelineSpec(model="m", examples=examples).examples == examples


INFINITE = [10**400, -(10**400), float("inf"), float("nan")]
NO_JSON = [float("inf"), 2**64, b"x", {1: 2}, [float("nan")]]
X: dict[str, Any] = {"tensor": "X"}
M: dict[str, Any] = {"model": "m"}
EXIT: dict[str, Any] = {"missing": ["Y"]}
MEMBER: dict[str, Any] = {"type": "integer", "member_of": "X"}


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (InputSpec, {**X, "kind": "text", "minimum": 1}),
        (InputSpec, {**X, "kind": "image", "maximum": 1}),
        (InputSpec, {**X, "minimum": 2, "maximum": 1}),
        (InputSpec, {**X, "minimum": True}),
        (InputSpec, {**X, "enum": []}),
        (InputSpec, {**X, "enum": ["one"]}),
        (InputSpec, {**X, "enum": [True]}),
        (InputSpec, {**X, "kind": "text", "enum": [1]}),
        (InputSpec, {**X, "kind": "json", "enum": ["a"]}),
        (InputSpec, {**X, "kind": "image", "enum": ["a"]}),
        *((InputSpec, {**X, "minimum": bound}) for bound in INFINITE),
        (ParameterSpec, {"type": "string", "minimum": 1}),
        (ParameterSpec, {"type": "boolean", "enum": [1]}),
        (ParameterSpec, {"type": "string", "enum": [1]}),
        (ParameterSpec, {"type": "integer", "enum": ["a"]}),
        (ParameterSpec, {"type": "integer", "minimum": 2, "maximum": 1}),
        (ParameterSpec, {"type": "float"}),
        *((ParameterSpec, {"type": "number", "maximum": bound}) for bound in INFINITE),
        *((OutputSpec, {**X, "kind": kind, "join": "concatenate"}) for kind in ("number", "image", "binary")),
        *((ErrorMatch, {"code": "any", **keys}) for keys in ({}, {"message": "a", "signed": True})),
        (ErrorMatch, {"code": "any", "message": "a", "message_pattern": "a"}),
        (ErrorMatch, {"code": "any", "message_pattern": "("}),
        (ErrorMatch, {"message": "x"}),
        (ErrorMatch, {"message": "x", "code": "OK"}),
        *((EarlyExitRule, {"reason": "x", **keys}) for keys in ({}, {**EXIT, "empty": ["Y"]}, {"missing": []})),
        (EarlyExitRule, {"reason": "x", "empty": []}),
        (EarlyExitRule, {"reason": "x", "error": {}}),
        *((EarlyExitRule, {"reason": each, **EXIT}) for each in ("", "No", "a b", "1a", "a" * 65, "a\n")),
        (ContractSpec, {"max_items": -1}),
        *((PipelineSpec, {**M, "inputs": {each: X}}) for each in ("", "a b", ".a", "a\n", "\u00e4", "a" * 129, "a/b")),
        *((PipelineSpec, {**M, "engine_errors": [each]}) for each in ("(", "", "x" * 1025)),
    ],
    ids=str,
)
def test_an_invalid_section_is_rejected(section: type[Section], keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        section(**keys)


@pytest.mark.parametrize(
    ("section", "keys", "text"),
    [
        (RefusalRule, {"message_pattern": "(", "code": "invalid_input"}, "is not a regular expression"),
        (RefusalRule, {"message_pattern": "", "code": "invalid_input"}, "at least 1 character"),
        (RefusalRule, {"message_pattern": "x", "code": "model_error"}, "context_length_exceeded"),
        (RefusalRule, {"message_pattern": "x", "code": "invalid_input", "detail": ""}, "at least 1 character"),
        *(
            (ParameterSpec, {**MEMBER, "member": each}, "member")
            for each in ("", ".a", "a.", "a.b.c", "a[0]", "[]", "a[].b")
        ),
        (ParameterSpec, {"type": "text_or_tokens", "tensor": "X"}, "is of type text_or_tokens, which needs member_of"),
        *((InputSpec, {**X, "data_url": True, "kind": each}, "data_url") for each in ("binary", "text")),
        (InputSpec, {**X, "data_url": True, "kind": "image", "base64": True}, "data_url"),
    ],
    ids=str,
)
def test_the_reason_names_the_key_or_what_it_needs(section: type[Section], keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        section.model_validate(keys)


@pytest.mark.parametrize(
    "name", ["triton_x", "sequence_id", "priority", "timeout", "headers", "binary_data_output", "shared_memory_region"]
)
def test_reserved_names_are_allowed_for_tensors_only(name: str) -> None:
    with pytest.raises(ValidationError, match="is reserved by Triton"):
        PipelineSpec.model_validate({"model": "m", "parameters": {name: {"type": "integer"}}})
    PipelineSpec.model_validate({"model": "m", "parameters": {name: {"type": "integer", "tensor": "X"}}})


@pytest.mark.parametrize("value", NO_JSON, ids=str)
@pytest.mark.parametrize(
    ("section", "keys", "key"),
    [(InputSpec, X, "default"), (ParameterSpec, {"type": "string"}, "default"), (PipelineSpec, M, "sample")],
)
def test_a_value_must_have_a_json_form(section: type[Section], keys: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match="is not valid in JSON: "):
        section(**keys, **{key: value if key == "default" else {"x": value}})


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
    assert (derived_spec("m").model, derived_spec("m").stream) == ("m", StreamSpec())
    p = pipeline(CONFIG, timeout_s=2, parameters={"note": {"type": "string", "tensor": "NOTE"}})
    assert [field.name for field in p.inputs] == ["X"]
    assert (pipeline(CONFIG).timeout_s, p.timeout_s) == (30, 2)


ONE = model("X FP32 [1]", "Y FP32 [1]")


@pytest.mark.parametrize(
    ("config", "keys", "location", "text"),
    [
        (CONFIG, {"inputs": {"x": {"tensor": "Z"}}}, ("inputs", "x", "tensor"), "'Z' is not a tensor of the model"),
        (CONFIG, {"outputs": {"y": {"tensor": "TEX"}}}, ("outputs", "y", "tensor"), "did you mean 'TEXT'?"),
        (
            CONFIG,
            {"inputs": {"x": {"tensor": "X", "kind": "text"}}},
            ("inputs", "x", "kind"),
            "'text' does not fit FP32: leave `kind` out for a tensor of numbers",
        ),
        (
            CONFIG,
            {"outputs": {"t": {"tensor": "TEXT"}}},
            ("outputs", "t", "kind"),
            "is missing: a BYTES tensor needs `kind: text`, `image`, `binary` or `json`",
        ),
        (CONFIG, {"inputs": {}}, ("inputs",), "do not have 'X', which the model requires"),
        (CONFIG, {"inputs": {"a": {"tensor": "X"}, "b": {"tensor": "X"}}}, ("inputs",), "have 'X' twice"),
        (
            CONFIG,
            {"inputs": {"x": {"tensor": "X"}}, "parameters": {"n": {"type": "string", "tensor": "NOPE"}}},
            ("parameters", "n", "tensor"),
            "did you mean 'NOTE'?",
        ),
        (
            CONFIG,
            {"early_exit": [{"reason": "a", "missing": ["Z"]}]},
            ("early_exit", 0, "missing"),
            "'Z' is not a tensor of the model",
        ),
        (
            CONFIG,
            {"early_exit": [{"reason": "a", "empty": ["X"]}]},
            ("early_exit", 0, "empty"),
            "'X' is not a tensor of the model",
        ),
        (CONFIG, {"contract": {"Z": {"max_items": 1}}}, ("contract", "Z"), "'Z' is not a tensor of the model"),
        (
            CONFIG,
            {"contract": {"Y": {"max_items": "n"}}},
            ("contract", "Y", "max_items"),
            "'n' is not an integer parameter",
        ),
        (CONFIG, {"batch": True}, ("batch",), "no batch dimension"),
        (CONFIG, {"outputs": {"y": {"tensor": "Y", "single": True}}}, ("outputs", "y", "single"), "it needs [-1]"),
        (
            CONFIG,
            {"inputs": {"x": {"tensor": "X", "optional": True}}},
            ("inputs", "x", "optional"),
            "is true, and the model requires 'X': set a `default`, or `optional` in the model's config.pbtxt",
        ),
        (
            ONE,
            {"parameters": {"X": {"type": "integer"}}},
            ("parameters", "X"),
            "has the same name as an input of the model",
        ),
        (model('X" FP32 [1]', "Y FP32 [1]"), {}, ("inputs",), ""),
        (model("X INVALID [1]"), {}, ("inputs", "X", "tensor"), "has datatype INVALID, which has no JSON form"),
        (
            model("X UINT8 [-1]", "Y FP32 [2]", max_batch_size=4),
            {"inputs": {"x": {"tensor": "X", "kind": "image"}}, "batch": True},
            ("inputs", "x"),
            "is a file or text in UINT8: items of different sizes do not fit in one tensor",
        ),
        (
            model("K INT32 [1]", "Y FP32 [-1]"),  # the limit must be a parameter of the request
            {"parameters": {"k": {"type": "integer", "tensor": "K"}}, "contract": {"Y": {"max_items": "k"}}},
            ("contract", "Y", "max_items"),
            "is not an integer parameter",
        ),
    ],
)
def test_mismatches_are_reported_with_their_key(
    config: ModelConfig, keys: dict[str, Any], location: tuple[str | int, ...], text: str
) -> None:
    found = mismatch(config, **keys)
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


def test_signed_rules_need_the_key() -> None:
    rules = [{"reason": "a", "error": {"code": "any", "signed": True}}]
    with pytest.raises(PipelineMismatch, match="GATEWAY_EARLY_EXIT_KEY") as caught:
        pipeline(CONFIG, key=None, early_exit=rules)
    assert caught.value.location == ("early_exit", 0, "error", "signed")
    assert pipeline(CONFIG, early_exit=rules).rules


TWO_INPUTS = model(["X FP32 [2]", "Y INT32 [1]"], ["Z FP32 [1]"])


def test_a_request_is_for_the_model_and_the_version() -> None:
    p = pipeline(TWO_INPUTS, version="3", parameters={"n": {"type": "integer"}})
    request = p.request_of_json(b'{"X": [1, 2], "Y": 3, "n": 4}')
    assert (request.model, request.version) == ("model", "3")
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs] == [
        ("X", "FP32", (2,)),
        ("Y", "INT32", (1,)),
    ]
    assert request.parameters == {"n": 4}


@pytest.mark.parametrize("name", ["timeout", "triton_x", "n"])
def test_the_deadline_cannot_use_a_reserved_parameter(name: str) -> None:
    with pytest.raises(ValidationError, match="another parameter"):
        pipeline(TWO_INPUTS, deadline_parameter=name, parameters={"n": {"type": "integer"}})


def stateful(datatype: str = "UINT64", name: str = "m", **more: Any) -> ModelConfig:
    sequence = SequenceBatching(datatype, **{"idle_s": 60.0, **more.pop("sequence", {})})
    return model("X FP32 [1]", "Y FP32 [1]", name=name, sequence=sequence, **more)


EXCLUDED: dict[str, Any] = {
    "batch": True,
    "coalesce": True,
    "idempotent": True,
    "cancel": {"model": "m", "input": "X"},
    "openai": {"completions": {"prompt": "X", "text": "Y"}},
}


@pytest.mark.parametrize("key", EXCLUDED)
def test_a_session_excludes_keys_that_change_how_a_request_runs(key: str) -> None:
    with pytest.raises(ValidationError, match=f"has session, which excludes {key}"):
        PipelineSpec.model_validate({"model": "m", "session": True, key: EXCLUDED[key]})


REFUSED = {
    "no sequence": (model("X FP32 [1]", "Y FP32 [1]", name="m"), "no model that a request runs through"),
    "iterative": (stateful(sequence={"is_iterative": True}), "needs no session"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_without_sequences_of_callers_are_refused(reason: str) -> None:
    config, text = REFUSED[reason]
    with pytest.raises(PipelineMismatch, match=text) as caught:
        pipeline(config, session=True)
    assert caught.value.location == ("session",)


def test_end_inputs_must_be_a_valid_request() -> None:
    with pytest.raises(PipelineMismatch, match="is not a valid request: 'X'") as caught:
        pipeline(stateful(), session={"end_inputs": {"X": "text"}})
    assert caught.value.location == ("session", "end_inputs")
    terms = terms_of(pipeline(stateful(), session={"end_inputs": {"X": 0}}))
    assert terms.spec.end_inputs == {"X": 0}


@pytest.mark.parametrize(
    ("config", "slots"),
    [
        (stateful(), 1),
        (stateful(max_batch_size=8, instance_count=2), 16),
        (stateful(max_batch_size=8, instance_count=2, sequence={"candidates": 3}), 6),
    ],
)
def test_the_places_of_a_model(config: ModelConfig, slots: int) -> None:
    terms = terms_of(pipeline(config, session=True))
    assert (terms.slots, terms.longest_idle_s) == ({"m": slots}, 60.0)
    assert (terms.spec.idle_s, terms.spec.max_s, terms.triton_idle_s) == (30.0, 600.0, 60.0)


def test_the_stateful_steps_of_an_ensemble_count() -> None:
    below = stateful(name="below", sequence={"idle_s": 5.0})
    terms = terms_of(pipeline(ensemble("outer", below), below, session=True))
    assert list(terms.slots) == ["below"]
    assert terms.triton_idle_s == 5.0


def test_requests_are_only_steps_of_sessions() -> None:
    compiled = pipeline(stateful(), session=True)
    with pytest.raises(InvalidRequest) as caught:
        compiled.request_of_json(b'{"X": 1}')
    assert "/v1/pipelines/p/sessions" in str(caught.value.hint)
    assert compiled.of_sequence().request_of_json(b'{"X": 1}').parameters == {}
    assert compiled.probe_of(b'{"X": 1}').parameters == {}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    ("datatype", "numbers"),
    [("UINT64", OWN_NUMBERS), ("INT64", OWN_NUMBERS), ("UINT32", OWN_SHORT_NUMBERS), ("INT32", OWN_SHORT_NUMBERS)],
)
def test_numbers_fit_the_control_and_belong_to_one_worker(datatype: str, numbers: range, number: int) -> None:
    ids = sequence_ids_of(stateful(datatype), {})
    made = {new_sequence_id(ids, Share(number, 3)) for _ in range(200)}
    assert len(made) > 190
    for each in made:
        ids.check(each)
        assert each in numbers
        assert (int(each) - numbers.start) % 3 == number - 1


def test_texts_have_the_length_that_triton_reads() -> None:
    ids = sequence_ids_of(stateful("BYTES"), {})
    made = {new_sequence_id(ids, WHOLE) for _ in range(10)}
    assert len(made) == 10
    for each in made:
        ids.check(each)
        assert (len(str(each)), str(each).startswith(OWN_TEXT)) == (128, True)
