"""The graph in the description of a pipeline."""

from typing import Any

from app.api.pipelines.catalog_endpoints import graph_described
from app.core.model import ModelConfig, Step
from tests.toolkit.models import model, pipeline

ERROR = {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[empty]"}
FIRST = model("X FP32 [-1]", "Y FP32 [-1]", name="first", instance_count=2, parameters=(("early_exits", "empty"),))
SECOND = model(
    ["Y FP32 [-1]", "W INT32 [1] optional"], "Z FP32 [-1]", name="second", parameters=(("bls_calls", "child"),)
)
CHILD = model("A FP32 [2]", "B FP32 [2]", name="child", max_batch_size=8)
CHAIN = ModelConfig(
    "chain",
    "ensemble",
    0,
    FIRST.inputs,
    SECOND.outputs,
    steps=(Step("first", "3", (("X", "X"),), (("Y", "t"),)), Step("second", "", (("Y", "t"),), (("Z", "Z"),))),
)


def described(config: ModelConfig, *below: ModelConfig, **spec: Any) -> dict[str, Any]:
    return graph_described(pipeline(config, *below, **spec))


def chain(**spec: Any) -> dict[str, Any]:
    return described(CHAIN, FIRST, SECOND, CHILD, **spec)


def test_a_step_has_its_models_configuration() -> None:
    first, second = chain()["steps"]
    assert first == {
        "name": "first",
        "ensemble": "chain",
        "model": "first",
        "version": "3",
        "backend": "python",
        "decoupled": False,
        "max_batch_size": 0,
        "instances": 2,
        "inputs": [{"name": "X", "datatype": "FP32", "shape": (-1,), "optional": False}],
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": (-1,), "optional": False}],
        "calls": [],
    }
    assert second["version"] is None
    assert [tensor["optional"] for tensor in second["inputs"]] == [False, True]


def test_declared_calls_of_a_script_are_in_the_step() -> None:
    (child,) = chain()["steps"][1]["calls"]
    assert (child["model"], child["max_batch_size"]) == ("child", 8)


def test_the_only_step_has_the_pipelines_version() -> None:
    (step,) = described(FIRST, version="2")["steps"]
    assert step["version"] == "2"


def test_an_error_exit_leaves_the_step_that_declares_it() -> None:
    exits = chain(early_exit=[{"reason": "empty", "error": ERROR}, {"reason": "other", "error": ERROR}])["exits"]
    assert exits == [{"step": "first", "reason": "empty"}], "no step declares the other reason"


def test_an_error_exit_leaves_the_only_step() -> None:
    exits = described(SECOND, CHILD, early_exit=[{"reason": "other", "error": ERROR}])["exits"]
    assert exits == [{"step": "second", "reason": "other"}]


def test_a_missing_output_exits_at_the_step_that_writes_it() -> None:
    rules = [{"reason": "none", "missing": ["Z"]}, {"reason": "nothing", "empty": ["Z"]}]
    exits = chain(early_exit=rules)["exits"]
    assert exits == [{"step": "second", "reason": "none"}, {"step": "second", "reason": "nothing"}]
