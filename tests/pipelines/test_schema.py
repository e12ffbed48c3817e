"""The schemas of requests and results match the decoder and the encoder; a pipeline accepts its own example."""

import base64
import json
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.codecs.kinds import check_image
from app.core.errors import InvalidInput
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, FLOAT_DATATYPES, INTEGER_DATATYPES, Deadline, InferenceResponse
from app.pipelines.examples import (
    Filled,
    event_schema,
    example_of,
    file_names_of,
    form_schema,
    request_schema,
    result_schema,
)
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector, run
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model, pipeline, response, tensor

INPUTS = ["N INT32 [1]", "L FP32 [-1,2]", "T BYTES [1]", "J BYTES [1]", "F BYTES [1]", "B BOOL [-1]"]
WORDS: dict[str, Any] = {
    "inputs": {
        "n": {"tensor": "N", "minimum": 1, "maximum": 3},
        "l": {"tensor": "L", "optional": True},
        "t": {"tensor": "T", "kind": "text", "enum": ["a", "b"], "default": "a"},
        "j": {"tensor": "J", "kind": "json", "optional": True},
        "f": {"tensor": "F", "kind": "image", "optional": True},
        "b": {"tensor": "B", "optional": True},
    },
    "parameters": {
        "i": {"type": "integer", "minimum": 1, "default": 2},
        "s": {"type": "string", "enum": ["x", "y"], "optional": True},
        "r": {"type": "number", "enum": [0.5, 1], "optional": True},
    },
}
P = pipeline(model([text + (" optional" if text[0] != "N" else "") for text in INPUTS]), **WORDS)


def accepts(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def decodes(p: Pipeline, fields: dict[str, Any]) -> bool:
    try:
        p.request_of_json(json.dumps(fields).encode())
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": [2]},
        {"n": 0},
        {"n": 4},
        {"n": 1.5},
        {"n": "1"},
        {"n": True},
        {"n": None},
        {},
        {"n": 1, "l": [[1, 2], [3, 4.5]]},
        {"n": 1, "l": [1]},
        {"n": 1, "l": None},
        {"n": 1, "l": [["1", 2]]},
        {"n": 1, "t": "b"},
        {"n": 1, "t": "c"},
        {"n": 1, "j": {"any": [1]}},
        {"n": 1, "b": [True]},
        {"n": 1, "b": [1]},
        {"n": 1, "i": 1},
        {"n": 1, "i": 0},
        {"n": 1, "s": "x"},
        {"n": 1, "s": "z"},
        {"n": 1, "r": 0.5},
        {"n": 1, "r": 0.6},
        {"n": 1, "zzz": 1},
    ],
)
def test_the_schema_of_a_request_matches_the_decoder(fields: dict[str, Any]) -> None:
    assert accepts(request_schema(P), fields) is decodes(P, fields)


def test_defaults_and_tensors_are_described() -> None:
    properties = request_schema(P)["properties"]
    assert properties["i"]["default"] == 2
    assert properties["t"]["default"] == "a"
    assert "tensor L FP32 [-1, 2]" in properties["l"]["description"]


def test_declared_descriptions_are_in_the_schemas() -> None:
    means = {"description": "What it means."}
    described = pipeline(
        model(["F BYTES [1]"], ["O FP32 [1]"]),
        inputs={"f": {"tensor": "F", "kind": "binary", **means}},
        parameters={"p": {"type": "integer", **means}},
        outputs={"o": {"tensor": "O", **means}},
    )
    request, form = request_schema(described)["properties"], form_schema(described)["properties"]
    assert request["f"]["description"] == "What it means.\n\nbinary; tensor F BYTES [1]"
    assert form["f"]["description"] == request["p"]["description"] == "What it means."
    assert result_schema(described)["properties"]["o"]["description"].startswith("What it means.\n\nnumber;")


def test_files_of_a_form_are_binary_and_those_of_a_batch_are_a_list() -> None:
    config, inputs = model("F BYTES [1]", max_batch_size=2), {"f": {"tensor": "F", "kind": "binary"}}
    p = pipeline(config, inputs=inputs, batch={"max_items": 9})
    file = {"type": "string", "format": "binary"}
    assert form_schema(p)["properties"]["f"] == {"type": "array", "items": file, "minItems": 1, "maxItems": 9}
    assert form_schema(P)["properties"]["f"] == file
    assert "format" not in request_schema(P)["properties"]["f"]


OUTPUTS = ["N FP32 [1]", "L INT64 [-1,2]", "T BYTES [1]", "W BYTES [-1]", "J BYTES [1]", "B BOOL [1]", "R BYTES [1]"]
ANSWER = response(
    tensor("N", "FP32", [0.5]),
    tensor("L", "INT64", [[1, 2]]),
    tensor("T", "BYTES", [b"a"]),
    tensor("W", "BYTES", [b"a", b"b"]),
    tensor("J", "BYTES", [b'{"a": 1}']),
    tensor("B", "BOOL", [True]),
    tensor("R", "BYTES", [b"stop"]),
    is_final=False,
)


def answering(*, decoupled: bool) -> Pipeline:
    kinds = {"T": "text", "W": "text", "J": "json", "R": "text"}
    return pipeline(
        model([], OUTPUTS, decoupled=decoupled),
        outputs={
            text[0].lower(): {"tensor": text[0], "kind": kinds.get(text[0], "number")}
            | ({"join": "last"} if text[0] == "R" else {})
            for text in OUTPUTS
        },
        early_exit=[{"reason": "no", "missing": ["N"]}, {"reason": "no", "empty": ["N"]}],
    )


def as_read(values: Any) -> Any:
    return orjson.loads(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))


def test_results_and_events_match_their_schemas() -> None:
    p = answering(decoupled=False)
    collector = Collector(p, p.request_of_json(b"{}"))
    for values in (collector.add(ANSWER), p.empty_values):
        assert accepts(event_schema(p), as_read(values))
        assert accepts(result_schema(p), as_read({**(values or {}), "early_exit": None}))
    assert not accepts(result_schema(p), as_read({**p.empty_values, "early_exit": "other"}))
    assert not accepts(result_schema(p), {})


async def test_a_joined_result_matches_its_schema() -> None:
    p = answering(decoupled=True)
    assert accepts(result_schema(p), await joined(p, InferenceResponse({})))
    values = await joined(p, ANSWER, ANSWER)
    assert accepts(result_schema(p), values)
    assert (values["t"], values["n"], values["w"]) == ("aa", [0.5, 0.5], ["a", "b", "a", "b"])
    assert not accepts(result_schema(p), {**values, "t": ["a"]})


async def joined(p: Pipeline, *answers: InferenceResponse) -> Any:
    engine, request = FakeEngine(answers=list(answers)), p.request_of_json(b"{}")
    ending = await run(Collector(p, request, is_whole=True), engine.infer_stream(request, Deadline.after(20)))
    return as_read({**ending.outputs[0], "early_exit": ending.early_exit})


def test_a_batch_adds_a_level_to_results() -> None:
    p = pipeline(model("X FP32 [1]", "Y FP32 [1]", max_batch_size=4), batch=True)
    assert accepts(result_schema(p), {"Y": [1, 2]})
    assert not accepts(result_schema(p), {"Y": 1})


@pytest.mark.parametrize(
    ("text", "more", "body", "is_valid"),
    [
        ("X FP32 [2,-1]", {}, [[1], [2]], True),
        ("X FP32 [2,-1]", {}, [[], []], True),
        ("X FP32 [2,-1]", {}, [[1]], False),
        ("X FP32 [2,-1]", {}, [[1], [2], [3]], False),
        ("X FP32 [2,-1] optional", {"optional": True}, [[1]], False),
        ("X FP32 [2,-1] optional", {"optional": True}, None, True),
        ("X FP16 [1]", {}, 65504, True),
        ("X FP16 [1]", {}, 65536, False),
        ("X FP32 [-1]", {}, [1e39], False),
        ("X BF16 [-1]", {}, [3.4e38], False),
        ("X UINT64 [1]", {}, 2**64 - 1, True),
        ("X UINT64 [1]", {}, 2**64, False),
        ("X BYTES [3]", {"kind": "text"}, ["a", "b"], False),
        ("X INT32 [2]", {"batch": True}, [[1, 2]], True),
        ("X INT32 [2]", {"batch": True}, [], False),
        ("X INT32 [2]", {"batch": True}, [[1, 2]] * 5, True),
        ("X INT32 [2]", {"batch": {"max_items": 4}}, [[1, 2]] * 5, False),
        ("X INT32 [1]", {"batch": True}, [1, 2], True),
    ],
)
def test_fixed_dimensions_and_ranges_are_in_the_schema(
    text: str, more: dict[str, Any], body: Any, is_valid: bool
) -> None:
    batch = more.get("batch", False)
    spec = {key: value for key, value in more.items() if key != "batch"}
    p = pipeline(model(text, max_batch_size=4 if batch else 0), inputs={"x": {"tensor": "X", **spec}}, batch=batch)
    assert accepts(request_schema(p), {"x": body}) is decodes(p, {"x": body}) is is_valid


KINDS = ["text", "image", "binary"]
PARAMETERS: dict[str, dict[str, Any]] = {
    "i": {"type": "integer", "minimum": 2, "maximum": 9},
    "n": {"type": "number", "maximum": -0.5},
    "e": {"type": "number", "enum": [0.25, 1]},
    "s": {"type": "string"},
    "w": {"type": "string", "enum": ["a", "b"]},
    "b": {"type": "boolean"},
}


def written_out(p: Pipeline) -> dict[str, Any]:
    example = example_of(p)
    return {name: value.nested() if isinstance(value, Filled) else value for name, value in example.items()}


def constraints(datatype: str) -> st.SearchStrategy[dict[str, Any]]:
    if datatype not in INTEGER_DATATYPES | FLOAT_DATATYPES:
        return st.just({})
    low, high = (0, 100) if datatype.startswith("U") else (-100, 100)
    pair = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    bounded = pair.map(lambda both: {"minimum": both[0], "maximum": both[1]})
    below = st.integers(low, high).map(lambda bound: {"maximum": bound})
    listed = st.lists(st.integers(low, high), min_size=1, max_size=3).map(lambda values: {"enum": values})
    return st.one_of(st.just({}), bounded, below, listed)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    datatype = draw(st.sampled_from(sorted(DTYPE_BY_DATATYPE)))
    dims = draw(st.lists(st.sampled_from([-1, 0, 1, 2, 3, 17]), max_size=3))
    kind = draw(st.sampled_from(KINDS)) if datatype == BYTES else "number"
    spec = {"tensor": "X", "kind": kind, "optional": draw(st.booleans())}
    text = f"X {datatype} {dims}".replace(", ", ",") + " optional" * spec["optional"]
    return text, spec | draw(constraints(datatype))


@given(inputs(), st.sets(st.sampled_from(sorted(PARAMETERS))), st.sampled_from([(0, False), (4, False), (4, True)]))
def test_a_pipeline_accepts_its_example(
    given_input: tuple[str, dict[str, Any]], names: set[str], batching: tuple[int, bool]
) -> None:
    (text, spec), (max_batch_size, batch) = given_input, batching
    parameters = {name: PARAMETERS[name] for name in names}
    p = pipeline(model(text, max_batch_size=max_batch_size), inputs={"x": spec}, parameters=parameters, batch=batch)
    body = written_out(p)
    assert set(body) == names | (set() if spec["optional"] else {"x"})
    p.request_of_json(json.dumps(body).encode())
    jsonschema.Draft202012Validator(request_schema(p)).validate(body)


def test_the_example_of_an_image_is_an_image_and_that_of_json_an_object() -> None:
    inputs = {"f": {"tensor": "F", "kind": "image"}, "j": {"tensor": "J", "kind": "json"}}
    p = pipeline(model(["F BYTES [1]", "J BYTES [1]"]), inputs=inputs)
    check_image(base64.b64decode(example_of(p)["f"]))
    assert example_of(p)["j"] == {}
    assert file_names_of(p) == {"f": ["image.png"]}


def test_a_sample_becomes_the_example_with_base64_files() -> None:
    sample = {"t": "a", "f": "sign.png", "n": None}
    words = {"f": {"tensor": "F", "kind": "image"}, "t": {"tensor": "T", "kind": "text"}, "n": {"tensor": "N"}}
    p = pipeline(model(["F BYTES [1]", "T BYTES [1]", "N FP32 [1]"]), inputs=words, sample=sample)
    example = example_of(p)
    assert (example["t"], example["n"]) == ("a", None)
    check_image(base64.b64decode(example["f"]))
    assert file_names_of(p) == {"f": ["sign.png"]}
