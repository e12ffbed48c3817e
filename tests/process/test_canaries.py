"""The samples of a catalog's pipelines are canaries."""

from pathlib import Path

import pytest

from app.pipelines.catalog import Catalog
from app.process.tritons import Declarations
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import ensemble, model

STEP, UNRELATED = (model("X FP32 [1]", "Y FP32 [1]", name=name) for name in ("step", "unrelated"))


async def declarations_of(folder: Path, pipelines: str) -> Declarations:
    (folder / "gateway.yaml").write_text(f"pipelines: {pipelines}")
    catalog = Catalog(FakeEngine.of(ensemble("chain", STEP), STEP, UNRELATED), folder / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    return Declarations(catalog)


@pytest.mark.parametrize(
    ("other", "deadline_s"),
    [
        ("model: step, timeout_s: 300", 300.0),
        ("model: step, timeout_s: 20, stream: {timeout_s: 400}", 400.0),
        ("model: step, timeout_s: 1", 30.0),
        ("model: unrelated, timeout_s: 300", 30.0),
    ],
)
async def test_the_deadline_is_the_longest_of_the_pipelines_that_share_a_model(
    tmp_path: Path, other: str, deadline_s: float
) -> None:
    """30 s is the deadline of requests that name a model in place of a pipeline."""
    sampled = "{model: chain, timeout_s: 2, sample: {X: [1.0]}}"
    declared = await declarations_of(tmp_path, f"{{sampled: {sampled}, other: {{{other}}}}}")
    (canary,) = declared.canaries().values()
    assert (canary.models, canary.deadline_s) == ({"chain", "step"}, deadline_s)


@pytest.mark.parametrize(("model", "first_output_s"), [("chain", 300.0), ("step", 300.0), ("unrelated", 0.0)])
async def test_a_model_has_the_longest_first_output_time_of_its_pipelines(
    tmp_path: Path, model: str, first_output_s: float
) -> None:
    pipelines = "{long: {model: chain, stream: {first_output_s: 300}}, short: {model: step, stream: true}}"
    assert (await declarations_of(tmp_path, pipelines)).of(model).first_output_s == first_output_s


async def test_the_engine_errors_of_a_model_are_those_of_its_pipelines(tmp_path: Path) -> None:
    """A pipeline over an ensemble declares the messages of the ensemble, and not those of its steps."""
    pipelines = "{one: {model: chain, engine_errors: [A, B]}, two: {model: chain, engine_errors: [C]}}"
    declared = await declarations_of(tmp_path, pipelines)
    assert [declared.of(name).engine_errors for name in ("chain", "step")] == [["A", "B", "C"], []]
