"""A pipeline accepts its own example; its declared requests become bodies with their files."""

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.codecs.kinds import check_image
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, FLOAT_DATATYPES, INTEGER_DATATYPES
from app.pipelines.examples import Filled, body_of, declared_requests, example_of, file_names_of, paths_in
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import request_schema
from tests.toolkit.models import model, pipeline

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


def test_the_example_of_an_image_is_an_image() -> None:
    p = pipeline(model("F BYTES [1]"), inputs={"f": {"tensor": "F", "kind": "image"}})
    check_image(base64.b64decode(example_of(p)["f"]))
    assert file_names_of(p) == {"f": "image.png"}


def test_the_example_of_json_is_an_object() -> None:
    p = pipeline(model("J BYTES [1]"), inputs={"j": {"tensor": "J", "kind": "json"}})
    assert example_of(p) == {"j": {}}


def test_a_sample_becomes_the_example_with_base64_files() -> None:
    sample = {"t": "a", "f": "sign.png", "n": None}
    words = {"f": {"tensor": "F", "kind": "image"}, "t": {"tensor": "T", "kind": "text"}, "n": {"tensor": "N"}}
    p = pipeline(model(["F BYTES [1]", "T BYTES [1]", "N FP32 [1]"]), inputs=words, sample=sample)
    example = example_of(p)
    assert (example["t"], example["n"]) == ("a", None)
    check_image(base64.b64decode(example["f"]))
    assert file_names_of(p) == {"f": "sign.png"}


@pytest.mark.parametrize(("shape", "text"), [((2, 300), "[[0] * 300] * 2"), ((300,), "[0] * 300")])
def test_a_large_value_is_written_as_an_expression(shape: tuple[int, ...], text: str) -> None:
    p = pipeline(model(f"X INT32 {list(shape)}".replace(", ", ",")), inputs={"x": {"tensor": "X"}})
    assert repr(example_of(p)["x"]) == text
    assert eval(text) == example_of(p)["x"].nested()


FIELDS = {"image": {"tensor": "F", "kind": "image"}, "note": {"tensor": "T", "kind": "text", "optional": True}}
READER = model(["F BYTES [1]", "T BYTES [1] optional"], name="reader")
VALUES = {"image": "pictures/a.png", "note": "pictures/a.png"}


def test_the_sample_is_the_first_of_the_declared_requests() -> None:
    examples = {"second": {"image": "b.png"}, "first": {"image": "c.png"}}
    spec = pipeline(READER, inputs=FIELDS, sample=VALUES, examples=examples).spec
    assert list(declared_requests(spec).items()) == [("sample", VALUES), *examples.items()]
    assert declared_requests(pipeline(READER, inputs=FIELDS, examples=examples).spec) == examples


def test_only_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\0\1")
    found = pipeline(READER, inputs=FIELDS)
    assert paths_in(found, VALUES) == {"image": "pictures/a.png"}
    assert orjson.loads(body_of(found, VALUES, tmp_path)) == {"image": "AAE=", "note": "pictures/a.png"}


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1234")
    found = pipeline(READER, inputs=FIELDS)
    assert body_of(found, {"image": "a.png"}, tmp_path, 4)
    with pytest.raises(OSError, match="larger than 3 bytes"):
        body_of(found, {"image": "a.png"}, tmp_path, 3)
