"""What is found in steps before they run: unknown names, types that do not fit, circles, and outputs that may miss."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from app.config.mismatch import PipelineMismatch
from app.core.inference import DTYPE_BY_DATATYPE, Tensor
from app.core.model import SequenceBatching
from app.pipelines.pipeline import CompileContext, Pipeline
from app.pipelines.spec import GatewaySpec
from app.steps.plan import verdict_of
from app.steps.planner import Planner
from app.steps.steps_spec import StepSpec
from tests.toolkit.models import model

MODELS = {
    each.name: each
    for each in [
        model(["IMAGE BYTES [1]"], ["BOXES FP32 [-1,4]", "QUALITY FP32 [1]"], name="detect", max_batch_size=4),
        model(["BOXES FP32 [-1,4]"], ["TEXT BYTES [1]", "LABELS BYTES [-1]"], name="read"),
        model(["X FP32 [4]"], ["LABEL BYTES [1]"], name="label", max_batch_size=8),
        model(["X FP32 [-1]"], ["Y FP32 [-1]"], name="same"),
        model(["X FP32 [-1]"], ["YES FP32 [1]", "NO FP32 [1]"], name="either", parameters=(("may_omit", "YES,NO"),)),
        model(["X FP32 [-1]", "HINT BYTES [1] optional"], ["Y FP32 [-1]"], name="hinted"),
        model(["TEXT BYTES [1]"], ["TOKEN INT32 [1]"], name="tokens", decoupled=True),
        model(["TOKEN INT32 [1]"], ["TEXT BYTES [1]"], name="words"),
        model(["TOKEN INT32 [1]"], ["TOKEN INT32 [1]"], name="more", decoupled=True),
        model(["X FP32 [-1]", "Z FP32 [-1]"], ["Y FP32 [-1]"], name="both"),
        model(["X FP32 [-1]"], ["Y FP32 [-1]"], name="stateful", sequence=SequenceBatching()),
    ]
}


def compiled(steps: str, **keys: Any) -> Pipeline:
    spec = GatewaySpec.model_validate({"pipelines": {"p": {"steps": yaml.safe_load(steps), **keys}}}).pipelines["p"]
    return Pipeline("p", spec, spec.config_of("p", MODELS), MODELS, CompileContext())


DETECT = "detect: {model: detect, inputs: {IMAGE: IMAGE}}"
READ = "read: {model: read, inputs: {BOXES: detect.BOXES}}"
MISTAKES = [
    ("{a: {model: stateful, inputs: {X: X}}}", "steps.a.model", "needs the id of a sequence"),
    ("{a: {model: same, inputs: {Z: X}}}", "steps.a.inputs.Z", "'Z' is not a tensor of the model"),
    ("{a: {model: same}}", "steps.a.inputs", "do not have 'X'"),
    (f"{{{DETECT}, a: {{model: same, inputs: {{X: detct.BOXES}}}}}}", "steps.a.inputs.X", "'detct' is not a step"),
    (
        f"{{{DETECT}, a: {{model: read, inputs: {{BOXES: detect.BOX}}}}}}",
        "steps.a.inputs.BOXES",
        "'BOX' is not a tensor of the model",
    ),
    (f"{{{DETECT}, a: {{model: same, inputs: {{X: detect.BOXES}}}}}}", "steps.a.inputs.X", "the shape [-1,4]"),
    (f"{{{DETECT}, {READ}, a: {{model: same, inputs: {{X: read.LABELS}}}}}}", "steps.a.inputs.X", "is BYTES, and"),
    (
        "{a: {model: same, inputs: {X: b.Y}}, b: {model: same, inputs: {X: a.Y}}}",
        "steps.a",
        "a circle: 'a' waits for 'b' waits for 'a'",
    ),
    ("{a: {model: same, inputs: {X: X}, after: [c]}}", "steps.a.after", "'c' is not a step"),
    (
        f"{{{DETECT}, e: {{when: {{empty: detect.QUALITY}}, exit: none}}}}",
        "steps.e.when",
        "can never hold: 'detect.QUALITY' has the shape [1]",
    ),
    (f"{{{DETECT}, e: {{when: {{below: [detect.BOXES, 1]}}, exit: none}}}}", "steps.e.when", "needs `any` or `all`"),
    (
        f"{{{DETECT}, {READ}, e: {{when: {{equals: [read.TEXT, 1]}}, exit: none}}}}",
        "steps.e.when",
        "compares 'read.TEXT', which is BYTES, with 1",
    ),
    (
        f"{{{DETECT}, e: {{when: {{equals: [mode, a]}}, exit: none}}}}",
        "steps.e.when",
        "is not a parameter or a tensor that a step reads",
    ),
    (
        f"{{{DETECT}, e: {{when: {{below: [speed, 1]}}, exit: none}}}}",
        "steps.e.when",
        "'speed', which is BYTES, with 1",
    ),
    (f"{{{DETECT}, e: {{when: {{empty: speed}}, exit: none}}}}", "steps.e.when", "can never hold: 'speed'"),
    (f"{{{DETECT}, e: {{when: {{equals: [count, 1.5]}}, exit: none}}}}", "steps.e.when", "not a value of INT64"),
    (
        "{a: {model: same, inputs: {X: X}}, b: {model: same, inputs: {X: X},"
        " when: {all_of: [{empty: a.Y}, {not: {empty: a.Y}}]}}}",
        "steps.b.when",
        "can never hold",
    ),
    ("{a: {model: same, inputs: {X: {value: [a]}}}}", "steps.a.inputs.X", "is not a value of FP32 [-1]"),
    (
        "{a: {model: tokens, inputs: {TEXT: T}}, b: {model: more, inputs: {TOKEN: a.TOKEN}}}",
        "steps.b.model",
        "follow 'a'",
    ),
    ("{a: {model: tokens, each: T, inputs: {TEXT: T}}}", "steps.a.model", "can have no `each`"),
    (
        "{a: {model: tokens, inputs: {TEXT: T}}, b: {model: words, inputs: {TOKEN: a.TOKEN}},"
        " c: {model: same, inputs: {X: X}, after: [b]}}",
        "steps.c.after",
        "runs for each response of 'a': name 'a' instead",
    ),
    (
        "{a: {model: tokens, inputs: {TEXT: T}}, b: {model: same, inputs: {X: X}, after: [a]},"
        " c: {model: words, inputs: {TOKEN: a.TOKEN}, when: {any: {below: [b.Y, 1]}}}}",
        "steps.a",
        "a circle: 'a' waits for 'b' waits for 'a'",
    ),
    (
        "{a: {model: tokens, inputs: {TEXT: T}}, b: {model: words, inputs: {TOKEN: {race: [a.TOKEN, TOKEN]}}}}",
        "steps.b.inputs.TOKEN",
        "is a race with the responses of 'a'",
    ),
    (
        f"{{{DETECT}, e: {{when: {{empty: detect.BOXES}}, exit: none}}, a: {{model: same, inputs: {{X: e.Y}}}}}}",
        "steps.a",
        "no outputs",
    ),
]


@pytest.mark.parametrize(("steps", "place", "text"), MISTAKES)
def test_a_mistake_is_found_at_its_key(steps: str, place: str, text: str) -> None:
    with pytest.raises(PipelineMismatch) as found:
        compiled(steps, parameters={"speed": {"type": "string"}, "count": {"type": "integer"}})
    assert text in found.value.text
    assert ".".join(map(str, found.value.location)).startswith(place)


VALUES = [
    ("FP32", [0.5, 1], True),
    ("FP32", [None], False),
    ("FP32", ["1"], False),
    ("FP16", [70000], False),
    ("BF16", [1], True),
    ("BOOL", [True, 0], True),
    ("BOOL", [2], False),
    ("UINT64", [2**64 - 1], True),
    ("INT64", [2**64 - 1], False),
    ("INT8", [-129], False),
    ("INT8", [1.5], False),
    ("INT8", [], True),
    ("BYTES", ["\u00fc", ""], True),
    ("BYTES", [1], False),
    ("BYTES", [["a"]], False),
    ("BYTES", {"a": 1}, False),
    ("FP32", [[1, 2], [3]], False),
    ("FP32", {"a": 1}, False),
]


@pytest.mark.parametrize(("datatype", "value", "fits"), VALUES)
def test_a_value_is_of_the_inputs_type_and_shape(datatype: str, value: Any, fits: bool) -> None:
    config = model([f"X {datatype} [-1]"], ["Y FP32 [1]"], name="same")
    specs = {"a": StepSpec.model_validate({"model": "same", "inputs": {"X": {"value": value}}})}
    with nullcontext() if fits else pytest.raises(PipelineMismatch, match=r"value of|has the shape"):
        Planner(specs, {"same": config}).planned("p")


COMPARED = [
    ("BOOL", "equals", True, True),
    ("BOOL", "below", 1, False),
    ("FP16", "equals", 70000, False),
    ("FP16", "below", 70000, True),
    ("BF16", "at_least", 2**64 - 1, False),
    ("BF16", "equals", 2**64 - 1, False),
    ("UINT64", "at_least", 2**64 - 1, True),
    ("INT8", "equals", 200, False),
    ("INT8", "below", 200, True),
]


@pytest.mark.parametrize(("datatype", "key", "value", "fits"), COMPARED)
def test_a_comparison_is_with_a_value_of_the_tensors_type(datatype: str, key: str, value: Any, fits: bool) -> None:
    config = model([f"X {datatype} [1]"], ["Y FP32 [1]"], name="same")
    steps = {"a": {"model": "same", "inputs": {"X": "X"}}, "e": {"when": {key: ["X", value]}, "exit": "done"}}
    specs = {name: StepSpec.model_validate(each) for name, each in steps.items()}
    with nullcontext() if fits else pytest.raises(PipelineMismatch, match=r"compares|value of"):
        plan = Planner(specs, {"same": config}).planned("p")
        condition = plan.order[-1].spec.when
        assert condition is not None
        assert verdict_of(condition, {"X": Tensor("X", datatype, np.zeros(1, DTYPE_BY_DATATYPE[datatype]))}) is (
            key == "below"
        )


OUTPUTS = [
    ({"tensor": "e.Y"}, "names 'e', which ends"),
    ({"tensor": "X"}, "names 'X', which is not an output of a step"),
    ({"first": ["a.Y", "b.LABEL"]}, "is BYTES, and 'a.Y' is FP32"),
    ({"race": ["a.Y", "a.Z"]}, "'Z' is not a tensor of the model"),
]


@pytest.mark.parametrize(("output", "text"), OUTPUTS)
def test_a_mistake_of_an_output_is_found_at_its_key(output: dict[str, Any], text: str) -> None:
    steps = "{a: {model: same, inputs: {X: X}}, b: {model: label, inputs: {X: X}}, e: {when: {empty: a.Y}, exit: none}}"
    with pytest.raises(PipelineMismatch) as found:
        compiled(steps, outputs={"right": {"tensor": "a.Y"}, "wrong": output})
    assert text in found.value.text
    assert found.value.location[:2] == ("outputs", "wrong")


def test_a_finish_reason_is_of_a_known_exit() -> None:
    steps = "{a: {model: read, inputs: {BOXES: B}}, e: {when: {empty: B}, exit: unsafe}}"
    form = {"completions": {"prompt": "prompt", "text": "text"}, "exits": {"unsave": "content_filter"}}
    with pytest.raises(
        ValidationError, match="'unsave', which is not a reason of an early exit; did you mean 'unsafe'"
    ):
        compiled(steps, openai=form)


def test_a_circle_does_not_name_the_steps_behind_it() -> None:
    with pytest.raises(PipelineMismatch) as found:
        compiled("{c: {model: same, inputs: {X: a.Y}}, a: {model: same, inputs: {X: a.Y}}}")
    assert (found.value.location, found.value.text) == (("steps", "a"), "is in a circle: 'a' waits for 'a'")


FAULTS = [
    ({"a": {"model": "same", "exit": "done"}}, "needs exactly one of model and exit"),
    ({"a": {"exit": "done"}}, "has exit, which needs `when`"),
    ({"a": {"when": {}, "model": "same"}}, "needs exactly one key"),
    ({"a": {"when": {"below": None}, "model": "same"}}, "needs exactly one key"),
    ({"a": {"inputs": {"X": "=b.X"}, "model": "same"}}, "pattern"),
    ({"a": {"inputs": {"X": ""}, "model": "same"}}, "pattern"),
    ({"a": {"when": {"any": {"empty": "X"}}, "model": "same"}}, "has any or all, which only"),
    ({"a": {"when": {"below": ["X", "1"]}, "model": "same"}}, "has below with a value that is not a number"),
    ({"a": {"when": {"equals": [1, 2]}, "model": "same"}}, "needs the name of a tensor or a field first"),
    ({"a": {"when": {"equals": ["X", None]}, "model": "same"}}, "neither a text, a number nor a boolean"),
    ({"a": {"when": {"any": {"in": ["X", [1, [2, 3]]]}}, "model": "same"}}, "neither a text, a number nor a boolean"),
    ({"a": {"model": "same", "each": "Z", "inputs": {"X": "X"}}}, "has each: Z, which is none of its inputs"),
    (
        {"a": {"model": "same", "inputs": {"X": {"first": ["A", "B"], "value": 1}}}},
        "exactly one of first, race and value",
    ),
    ({"a": {"model": "p", "inputs": {"X": "X"}}}, "the name of a model that a pipeline calls"),
]


@pytest.mark.parametrize(("steps", "text"), FAULTS)
def test_keys_that_do_not_stand_together_are_refused(steps: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text.replace("`", ".")):
        GatewaySpec.model_validate({"pipelines": {"p": {"steps": steps}}})


@pytest.mark.parametrize("key", [{"model": "same"}, {"batch": {}}, {"version": "1"}, {"session": {}}])
def test_steps_exclude_what_is_of_one_model(key: dict[str, Any]) -> None:
    steps = {"a": {"model": "same", "inputs": {"X": "X"}}}
    with pytest.raises(ValidationError, match="steps"):
        GatewaySpec.model_validate({"pipelines": {"p": {"steps": steps, **key}}})


MAY_MISS = [
    ("{a: {model: same, inputs: {X: X}}}", "a.Y", False),
    ("{a: {model: same, inputs: {X: X}, optional: true}}", "a.Y", True),
    ("{a: {model: same, inputs: {X: X}, when: {not_empty: X}}}", "a.Y", True),
    ("{e: {model: either, inputs: {X: X}}, a: {model: same, inputs: {X: e.YES}}}", "a.Y", True),
    ("{e: {model: either, inputs: {X: X}, optional: true}, a: {model: hinted, inputs: {X: X}}}", "a.Y", False),
    (
        "{e: {model: same, inputs: {X: X}, optional: true}, a: {model: same, inputs: {X: {first: [e.Y, X]}}}}",
        "a.Y",
        False,
    ),
]


@pytest.mark.parametrize(("steps", "output", "is_optional"), MAY_MISS)
def test_an_output_that_may_miss_is_known(steps: str, output: str, is_optional: bool) -> None:
    pipeline = compiled(steps, outputs={"y": {"tensor": output}})
    assert pipeline.outputs[0].tensor.optional is is_optional


@pytest.mark.parametrize(
    ("one", "other", "is_optional"),
    [
        ("below: [detect.QUALITY, 0.5]", "at_least: [detect.QUALITY, 0.5]", False),
        ("below: [detect.QUALITY, 0.5]", "at_least: [detect.QUALITY, 0.6]", True),
        ("empty: detect.BOXES", "not_empty: detect.BOXES", False),
        ("equals: [detect.QUALITY, 1]", "not: {equals: [detect.QUALITY, 1]}", False),
    ],
)
def test_of_two_steps_with_opposite_conditions_one_always_writes(one: str, other: str, is_optional: bool) -> None:
    steps = (
        f"{{{DETECT}, a: {{model: read, inputs: {{BOXES: detect.BOXES}}, when: {{{one}}}}},"
        f" b: {{model: read, inputs: {{BOXES: detect.BOXES}}, when: {{{other}}}}}}}"
    )
    pipeline = compiled(steps, outputs={"text": {"first": ["a.TEXT", "b.TEXT"], "kind": "text"}})
    assert pipeline.outputs[0].tensor.optional is is_optional


def test_there_may_be_64_steps() -> None:
    """Each is on two ways to the next one."""
    sources = [f"s{number}.Y" for number in range(64)]
    chain = {
        f"s{number}": {"model": "both", "inputs": {"X": name, "Z": name}} for number, name in enumerate(sources, 1)
    }
    first = {"s0": {"model": "same", "inputs": {"X": "X"}}}
    with pytest.raises(ValidationError, match="at most 64"):
        GatewaySpec.model_validate({"pipelines": {"p": {"steps": first | chain}}})
    del chain["s64"]
    pipeline = compiled(yaml.safe_dump(first | chain))
    assert [each.name for each in pipeline.outputs] == ["s63.Y"]
    assert len(pipeline.graph.steps) == 64


def test_the_tensors_of_the_request_are_what_the_steps_read() -> None:
    pipeline = compiled(f"{{{DETECT}, {READ}, each: {{model: label, each: ROWS, inputs: {{X: ROWS}}}}}}")
    given = {each.name: (each.datatype, each.dims) for each in pipeline.config.inputs}
    assert given == {"IMAGE": ("BYTES", (1,)), "ROWS": ("FP32", (-1, 4))}
    assert [each.name for each in pipeline.outputs] == ["detect.QUALITY", "read.TEXT", "read.LABELS", "each.LABEL"]


def test_only_the_outputs_that_are_read_are_requested() -> None:
    pipeline = compiled(f"{{{DETECT}, {READ}}}", outputs={"text": {"tensor": "read.TEXT", "kind": "text"}})
    (layer,) = pipeline.layers
    requested = {step.name: [each.name for each in step.outputs.values()] for step in layer.order}
    assert requested == {"detect": ["BOXES"], "read": ["TEXT"]}
