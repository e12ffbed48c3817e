"""Schemas of callers are bounded before they are compiled, and so is the work for an answer."""

import json
import re
import time
from functools import reduce
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.llm import answer_schema
from app.llm.answer_schema import AnswerSchema, answer_schema_of


def chained(links: int, of: str, end: dict[str, Any] | None = None) -> dict[str, Any]:
    """Each definition refers to the next one twice: 2 to the power of ``links`` paths."""
    definitions: dict[str, Any] = {
        f"a{index}": {of: [{"$ref": f"#/$defs/a{index + 1}"}, {"$ref": f"#/$defs/a{index + 1}"}]}
        for index in range(links)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{links}": end or {"type": "string"}}}


REFERENCES = {f"a{each}": {"$ref": f"#/$defs/a{each + 1}"} for each in range(4000)} | {"a4000": {}}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (chained(28, "anyOf"), "takes too many steps"),
        (
            {"properties": {"a": {"items": chained(28, "allOf")["$defs"]["a0"]}}} | chained(28, "allOf"),
            "takes too many",
        ),
        ({"$ref": "#"}, "has a reference that leads to itself for the same value"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}}, "leads to itself"),
        ({"$ref": "#/$defs/a0", "$defs": REFERENCES}, "has too many references that lead to each other"),
        ({"$ref": "http://example.com/a"}, "must refer only to itself: a $ref begins with #"),
        ({"$defs": {"unused": {"$ref": "file:///etc/hostname"}}}, "must refer only to itself"),
        ({"$ref": "#/$defs/a"}, "has a reference to something that it does not have"),
        ({"$id": "http://example.com/a"}, "must not have $id"),
        ({"$dynamicRef": "#a"}, "must not have $dynamicRef"),
        ({"unevaluatedProperties": False}, "must not have unevaluatedProperties"),
        ({"allOf": [{"pattern": "a"}] * 65}, "has more than 64 patterns"),
        ({"allOf": [{"pattern": "[" + r"\p{L}\p{N}" * 20 + "]"}] * 64}, "has more than 8192 characters in patterns"),
        ({"patternProperties": {"a" * 4097: {}, "b" * 4096: {}}}, "has more than 8192 characters in patterns"),
        ({"pattern": "(?=a)b"}, "is not a JSON schema that can be checked"),
        ({"pattern": "(((a{100}){100}){100}){100}"}, "is not a JSON schema that can be checked"),
        ({"type": "person"}, "is not a JSON schema that can be checked"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_hostile_schema_is_refused(schema: dict[str, Any], problem: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=re.escape(problem)):
        AnswerSchema(schema)
    assert time.process_time() - began < 5


def test_a_pattern_takes_linear_time() -> None:
    began = time.process_time()
    assert AnswerSchema({"pattern": "^(a+)+$"}).problem_of(json.dumps("a" * 10_000 + "b")) is not None
    assert time.process_time() - began < 5  # with backtracking: for ever


FRACTIONS = [each + 0.5 for each in range(1000)]


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"items": {"multipleOf": 1e-300}}, [3] * 10_000),
        ({"items": {"const": FRACTIONS}}, [FRACTIONS] * 100),
        ({"items": {"enum": [[each] for each in range(1000)]}}, [[999]] * 1000),
        ({"items": {"dependentRequired": {f"a{each}": ["x"] for each in range(1000)}}}, [{"x": 1}] * 1000),
        ({"allOf": [{"uniqueItems": True}] * 1000}, [[each] for each in range(1000)]),
        ({"items": {"patternProperties": {f"{each}": {} for each in range(64)}}}, [{"a": 1}] * 10_000),
    ],
    ids=["fractions", "lists of fractions", "enum of lists", "dependentRequired", "uniqueItems", "patternProperties"],
)
def test_a_slow_keyword_counts_as_many_steps(schema: Any, answer: Any) -> None:
    """The check itself would take long, and no other thread runs meanwhile."""
    checked = AnswerSchema(schema)
    began = time.process_time()
    assert checked.problem_of(json.dumps(answer)) == "is too large to be checked"
    assert time.process_time() - began < 1


def test_a_schema_is_compiled_once_while_it_is_used() -> None:
    schema = {"properties": {"a": {"type": "string"}}}
    given = (schema, dict(schema), {**schema, "title": "b"})
    first, same, other = (answer_schema_of(json.dumps(each).encode()) for each in given)
    assert first is same
    assert first is not other


def test_usual_answers_are_within_the_limit() -> None:
    kinds = [
        {"properties": {"kind": {"const": each}, "text": {"type": "string"}}, "required": ["kind"]}
        for each in range(20)
    ]
    schema = AnswerSchema({"type": "array", "items": {"anyOf": kinds}})
    assert schema.problem_of(json.dumps([{"kind": each % 20, "text": "a" * 100} for each in range(1000)])) is None
    dates = AnswerSchema({"items": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}})
    assert dates.problem_of(json.dumps(["2026-11-27"] * 1500)) is None
    assert AnswerSchema({"items": {"type": "integer"}}).problem_of(json.dumps([1] * 100_000)) is None


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"items": chained(12, "anyOf")["$defs"]["a0"], **chained(12, "anyOf")}, [1] * 10_000),
        ({"pattern": "[01]*1[01]{500}[^01]"}, "01" * 50_000),
        ({"patternProperties": {"[01]*1[01]{500}[^01]": {}}}, {"01" * 50_000: 1}),
    ],
    ids=["references", "text", "name"],
)
def test_the_work_for_an_answer_is_bounded(schema: Any, answer: Any) -> None:
    checked = AnswerSchema(schema)
    assert checked.problem_of("[1]") in (None, "does not fit the schema")
    assert checked.problem_of(json.dumps(answer)) == "is too large to be checked"


MANY = [f"{each:x}" for each in range(14_000)]


@pytest.mark.parametrize(
    ("part", "full", "empty"),
    [
        ({"properties": dict.fromkeys(MANY, True)}, dict.fromkeys(MANY, 1), {}),
        ({"prefixItems": [True] * 14_000}, MANY, []),
    ],
    ids=["names", "indexes"],
)
def test_the_count_takes_linear_time(part: Any, full: Any, empty: Any) -> None:
    schema = AnswerSchema({"items": part})
    began = time.process_time()
    assert schema.problem_of(json.dumps([full, *[empty] * 20_000])) is None
    assert time.process_time() - began < 2  # if each name is looked up in each object: 8 s


def test_a_failed_branch_is_not_explained_at_any_price() -> None:
    """The checker's own message takes 0.7 s here."""
    schema = AnswerSchema(chained(12, "anyOf"))
    began = time.process_time()
    assert schema.problem_of("1") == "does not fit the schema"
    assert time.process_time() - began < 0.5


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "all": {"items": {"$ref": "#"}}, "of": {"const": 1}},
}
EXPRESSIONS: dict[str, Any] = {
    "$ref": "#/$defs/any",
    "$defs": {
        "any": {"anyOf": [{"$ref": "#/$defs/minus"}, {"$ref": "#/$defs/not"}, {"type": "number"}]},
        "minus": {"type": "object", "properties": {"a": {"$ref": "#/$defs/any"}, "k": {"const": "-"}}},
        "not": {"type": "object", "properties": {"a": {"$ref": "#/$defs/any"}, "k": {"const": "!"}}},
    },
}


def deep(levels: int, name: str, inner: Any, **members: Any) -> Any:
    return reduce(lambda value, _: {name: value, **members}, range(levels), inner)


def test_a_schema_may_name_itself_one_level_deeper() -> None:
    tree = AnswerSchema(TREE)
    assert tree.problem_of(json.dumps(deep(60, "left", {"of": 1}))) is None
    assert tree.problem_of(json.dumps({"all": [deep(60, "right", {"of": 2})]})) is not None
    expressions = AnswerSchema(EXPRESSIONS)
    assert expressions.problem_of(json.dumps(deep(10, "a", 1, k="!"))) is None
    began = time.process_time()
    assert expressions.problem_of(json.dumps(deep(60, "a", "x", k="?"))) == "is too large to be checked"
    assert time.process_time() - began < 1


@pytest.mark.parametrize("levels", [100, 300, 900, 100_000])
def test_a_deep_answer_is_no_crash(levels: int) -> None:
    text = '{"a":' * levels + "1" + "}" * levels
    assert AnswerSchema({}).problem_of(text) in (None, "is too large to be checked", "is not JSON")


@pytest.mark.parametrize("text", ["1e400", "9" * 100_000, "-" + "9" * 5000, '{"a": 1, "a": 2}', "NaN", '"\\ud800"'])
def test_an_unusual_answer_is_no_crash(text: str) -> None:
    for schema in ({}, {"multipleOf": 1e-300}, {"multipleOf": 3, "maximum": 10}, {"uniqueItems": True}):
        AnswerSchema(schema).problem_of(text)


def test_references_are_replaced_by_what_they_name() -> None:
    schema = AnswerSchema({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "string"}}})
    assert (schema.problem_of('"x"'), schema.problem_of("1")) == (
        None,
        'does not fit the schema at its root: 1 is not of type "string"',
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "string"}, {"type": "integer", "minimum": 0}, {"enum": ["a", None, 1]}]),
    lambda inner: st.one_of(
        st.builds(lambda each: {"items": each, "type": "array"}, inner),
        st.builds(lambda one, two: {"properties": {"a": one, "b": two}, "required": ["a"]}, inner, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(lambda each: {"additionalProperties": each}, inner),
    ),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_the_verdict_is_that_of_another_checker(schema: dict[str, Any], value: Any) -> None:
    expected = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (AnswerSchema(schema).problem_of(json.dumps(value)) is None) == expected


def test_the_extra_is_installed_here() -> None:
    assert answer_schema.CAN_CHECK
