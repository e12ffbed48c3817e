"""Random graphs of steps give the same answer as an interpreter that runs one step after the other."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from app.config.mismatch import PipelineMismatch
from app.core.errors import ModelError
from app.core.inference import Array, Deadline, InferenceRequest, Tensor
from app.steps.plan import Source
from app.steps.planner import Planner
from app.steps.steps_engine import StepsEngine
from app.steps.steps_spec import StepSpec
from tests.toolkit.numpy_models import Arrays, FreeSlots, NumpyEngine, numpy_model

GRAPHS = 1000
LONG, ONE, PAIRS = "[-1]", "[1]", "[-1,2]"
FAILS_ABOVE = 30.0


def rest(x: Array) -> Arrays:
    return {"Y": x[1:]}


def summed(a: Array, b: Array) -> Arrays:
    return {"Y": np.concatenate([a, b])[:8], "S": np.asarray([a.sum() - b.sum()])}


def one_of_two(x: Array) -> Arrays:
    return {"YES": x} if x.sum() > 0 else {"NO": x}


def paired(x: Array) -> Arrays:
    return {"P": x[: len(x) // 2 * 2].reshape(-1, 2)}


def item(x: Array) -> Arrays:
    return {"Y": x * 2, "S": x.sum(keepdims=True)}


def flat(p: Array) -> Arrays:
    return {"Y": p.reshape(-1)}


def fragile(x: Array) -> Arrays:
    if abs(x).sum() > FAILS_ABOVE:
        raise ModelError("The model failed.")
    return {"Y": -x}


MODELS = [
    numpy_model("rest", ["x FP32 [-1]"], ["Y FP32 [-1]"], rest),
    numpy_model("summed", ["a FP32 [-1]", "b FP32 [-1]"], ["Y FP32 [-1]", "S FP32 [1]"], summed),
    numpy_model(
        "one_of_two",
        ["x FP32 [-1]"],
        ["YES FP32 [-1]", "NO FP32 [-1]"],
        one_of_two,
        parameters=(("may_omit", "YES,NO"),),
    ),
    numpy_model("paired", ["x FP32 [-1]"], ["P FP32 [-1,2]"], paired),
    numpy_model("flat", ["p FP32 [-1,2]"], ["Y FP32 [-1]"], flat),
    numpy_model("item", ["x FP32 [2]"], ["Y FP32 [2]", "S FP32 [1]"], item, max_batch_size=3),
    numpy_model("single_item", ["x FP32 [2]"], ["Y FP32 [2]", "S FP32 [1]"], item),
    numpy_model("doubled", ["x FP32 [-1]"], ["Y FP32 [-1]"], lambda x: {"Y": x * 2}, max_batch_size=4),
    numpy_model("fragile", ["x FP32 [-1]"], ["Y FP32 [-1]"], fragile),
]
BY_NAME = {each.config.name: each for each in MODELS}
CONFIGS = {name: each.config for name, each in BY_NAME.items()}


@dataclass
class Graph:
    """Random steps, in an order in which they can run, and what they write by dims."""

    rng: random.Random
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: dict[str, list[str]] = field(default_factory=lambda: {LONG: ["A", "B"], ONE: [], PAIRS: []})

    def source(self, dims: str) -> Any:
        names = self.written[dims]
        if dims == LONG and self.rng.random() < 0.1:
            return {"value": [self.rng.randint(-4, 4) for _ in range(self.rng.randint(0, 3))]}
        if len(names) > 1 and self.rng.random() < 0.25:
            return {"first": self.rng.sample(names, 2)}
        return self.rng.choice(names)

    def condition(self, depth: int = 0) -> dict[str, Any]:
        kind = self.rng.choice(["empty", "not_empty", "below", "at_least", "over", "in", "any_of", "all_of", "not"])
        ones, longs = self.written[ONE], self.written[LONG]
        if depth < 2 and kind in ("any_of", "all_of"):
            return {kind: [self.condition(depth + 1) for _ in range(2)]}
        if depth < 2 and kind == "not":
            return {"not": self.condition(depth + 1)}
        value = self.rng.randint(-3, 5)
        if ones and kind in ("below", "at_least"):
            return {kind: [self.rng.choice(ones), value]}
        if ones and kind == "in":
            return {"in": [self.rng.choice(ones), [value, value + 1, 0]]}
        if kind == "over":
            return {self.rng.choice(["any", "all"]): {"below": [self.rng.choice(longs), value]}}
        return {"empty" if kind == "empty" else "not_empty": self.rng.choice(longs)}

    def add(self, name: str) -> None:
        if self.rng.random() < 0.1:
            self.steps[name] = {"when": self.condition(), "exit": self.rng.choice(["full", "late"])}
            return
        model = self.rng.choice(MODELS).config
        has_each = model.name in ("item", "single_item")
        if (has_each or model.name == "flat") and not self.written[PAIRS]:
            model, has_each = BY_NAME["paired"].config, False
        step: dict[str, Any] = {"model": model.name, "inputs": {}}
        for tensor in model.inputs:
            dims = PAIRS if has_each or tensor.dims == (-1, 2) else LONG
            step["inputs"][tensor.name] = self.rng.choice(self.written[PAIRS]) if has_each else self.source(dims)
        if has_each:
            step |= {"each": step["inputs"]["x"], "in_flight": self.rng.randint(1, 3)}
        if self.rng.random() < 0.3:
            step["when"] = self.condition()
        elif (other := self.steps.get(self.rng.choice(["start", *self.steps]), {}).get("when")) is not None:
            step["when"] = {"not": other}
        if self.rng.random() < 0.2 and self.steps:
            step["after"] = [self.rng.choice([*self.steps])]
        step["optional"] = model.name == "fragile" or self.rng.random() < 0.1
        self.steps[name] = step
        for tensor in model.outputs:
            dims = str([*((-1,) if has_each else ()), *tensor.dims]).replace(" ", "")
            self.written.setdefault(dims, []).append(f"{name}.{tensor.name}")


class Interpreter:
    """Runs the steps in the order of the graph. An exit does not end it: it only notes the reasons."""

    def __init__(self, given: dict[str, Array]) -> None:
        self.values: dict[str, Array | None] = dict(given)
        self.reasons: set[str] = set()
        self.skipped: set[str] = set()

    def look(self, source: Any) -> Array | None:
        if isinstance(source, dict) and "value" in source:
            return np.asarray(source["value"], np.float32)
        names = source["first"] if isinstance(source, dict) else [source]
        return next((self.values[name] for name in names if self.values[name] is not None), None)

    def holds(self, condition: dict[str, Any], over: Any = None) -> bool | None:
        ((key, value),) = condition.items()
        if key in ("any_of", "all_of"):
            results = [self.holds(each) for each in value]
            decisive = key == "any_of"
            return decisive if decisive in results else None if None in results else not decisive
        if key == "not":
            result = self.holds(value)
            return None if result is None else not result
        if key in ("any", "all"):
            return self.holds(value, any if key == "any" else all)
        array = self.values[value if isinstance(value, str) else value[0]]
        if array is None:
            return None
        if key in ("empty", "not_empty"):
            return (len(array) == 0) == (key == "empty")
        results = []
        for element in array.reshape(-1).tolist():
            at_least = element >= value[1] if key != "in" else False
            results.append(element in value[1] if key == "in" else at_least if key == "at_least" else not at_least)
        return bool((over or all)(results))

    def run(self, name: str, step: dict[str, Any]) -> None:
        if "exit" in step:
            if self.holds(step["when"]):
                self.reasons.add(step["exit"])
            return
        found = BY_NAME[step["model"]]
        inputs = {tensor: self.look(source) for tensor, source in step["inputs"].items()}
        outputs: Arrays = {}
        runs = "when" not in step or self.holds(step["when"])
        if runs and all(each is not None for each in inputs.values()):
            try:
                outputs = self.each(found.run, step, inputs) if "each" in step else found.run(**inputs)
            except ModelError:
                assert step["optional"]
                self.skipped.add(name)
        for tensor in found.config.outputs:
            array = outputs.get(tensor.name)
            self.values[f"{name}.{tensor.name}"] = None if array is None else np.asarray(array, np.float32)

    @staticmethod
    def each(run: Any, step: dict[str, Any], inputs: dict[str, Array]) -> Arrays:
        rows = [run(x=row) for row in inputs["x"]]
        shapes = {"Y": (0, 2), "S": (0, 1)}
        return {key: np.stack([row[key] for row in rows]) if rows else np.zeros(shape) for key, shape in shapes.items()}


@pytest.mark.parametrize("seed", range(GRAPHS // 50))
async def test_random_graphs_answer_as_an_interpreter_does(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        graph = Graph(rng)
        graph.steps["start"] = {"model": "summed", "inputs": {"a": "A", "b": "B"}}
        graph.written[LONG].append("start.Y")
        graph.written[ONE].append("start.S")
        for number in range(rng.randint(1, 9)):
            graph.add(f"s{number}")
        await compare(graph, rng)


async def compare(graph: Graph, rng: random.Random) -> None:
    known = [name for names in graph.written.values() for name in names if "." in name]
    sources = [Source((name,)) for name in rng.sample(known, min(len(known), rng.randint(1, 4)))]
    sources += [Source(tuple(rng.sample(names, 2))) for names in graph.written.values() if len(names) > 3]
    sources = [each for each in sources if not {"A", "B"} & {*each.names}]
    shuffled = rng.sample([*graph.steps.items()], len(graph.steps))
    specs = {name: StepSpec.model_validate(step) for name, step in shuffled}
    given = {name: np.asarray([rng.randint(-9, 9) for _ in range(rng.randint(0, 6))], np.float32) for name in "AB"}
    engine = NumpyEngine(BY_NAME, pause=lambda _: rng.choice([0, 0, 0.0005]))
    slots = FreeSlots()
    try:
        plan = Planner(specs, CONFIGS).planned("graph", dict.fromkeys(sources, ()))
    except PipelineMismatch as exc:
        if "can never hold" in exc.text:
            return
        raise
    inputs = tuple(Tensor(each.name, "FP32", given[each.name]) for each in plan.inputs)
    request = plan.extended(InferenceRequest("graph", inputs))
    response = await StepsEngine(engine, slots.enter).infer(request, Deadline.after(10))
    interpreter = Interpreter(given)
    for name, step in graph.steps.items():
        interpreter.run(name, step)
    expected = {each.text: interpreter.look({"first": each.names}) for each in sources}
    answered = {name: tensor.array for name, tensor in response.outputs.items() if name != "skipped"}
    assert engine.running == slots.taken == 0
    if interpreter.reasons:
        assert response.early_exit in interpreter.reasons
    else:
        assert response.early_exit is None
        assert answered.keys() == {name for name, array in expected.items() if array is not None}
        if plan.reports_skipped:
            skipped = {name.decode() for name in response.outputs["skipped"].array}
            assert skipped == interpreter.skipped
    for name, array in answered.items():
        assert expected[name] is not None
        np.testing.assert_array_equal(array, expected[name])
    optional = {name for name, each in zip(plan.answers, plan.outputs, strict=False) if each.optional}
    assert optional >= {name for name, array in expected.items() if array is None}
