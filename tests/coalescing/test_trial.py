"""Which pipelines may share calls: what is refused at the start, and what the trial of the sample finds."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from app.coalescing.rows import Coalescing
from app.config.mismatch import PipelineMismatch
from app.core.engine import Engine
from app.core.errors import GatewayError, UpstreamUnavailable
from app.core.inference import Tensor
from app.core.model import ModelConfig, SequenceBatching
from app.pipelines.catalog import Catalog
from app.pipelines.examples import trial_requests
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import GatewaySpec
from tests.toolkit.engine import (
    Distort,
    FakeEngine,
    Outputs,
    RowEngine,
    items_of,
    outputs_of,
    rows_of,
    with_rows,
    without_text,
)
from tests.toolkit.models import ensemble, model, pipeline

CONFIG = model("ITEM INT64 [1]", ["NEGATIVE INT64 [1]", "TEXT BYTES [1]"], name="m", max_batch_size=16)
DECLARED: dict[str, Any] = {"idempotent": True, "coalesce": True, "sample": {"ITEM": 3}}


REFUSED: dict[str, tuple[ModelConfig, dict[str, Any], str]] = {
    "idempotent": (CONFIG, {"idempotent": False}, "not `idempotent: true`"),
    "sample": (CONFIG, {"sample": None}, "no `sample`"),
    "warmup": (CONFIG, {"warmup": False}, "no `sample`"),
    "error": (CONFIG, {"early_exit": [{"reason": "r", "error": {"code": "any", "message": "m"}}]}, "`early_exit`"),
    "signed": (CONFIG, {"early_exit": [{"reason": "r", "error": {"code": "any", "signed": True}}]}, "`early_exit`"),
    "missing": (CONFIG, {"early_exit": [{"reason": "r", "missing": ["TEXT"]}]}, "`early_exit`"),
    "empty": (CONFIG, {"early_exit": [{"reason": "r", "empty": ["TEXT"]}]}, "`early_exit`"),
    "cancel": (CONFIG, {"cancel": {"model": "m", "input": "ITEM"}}, "`cancel`"),
    "deadline": (CONFIG, {"deadline_parameter": "until"}, "`deadline_parameter`"),
    "contract": (CONFIG, {"contract": {"TEXT": {"max_items": 1}}}, "contract of 'TEXT' counts items"),
    "decoupled": (replace(CONFIG, decoupled=True), {}, "model 'm' is decoupled"),
    "no batches": (replace(CONFIG, max_batch_size=0), {}, "max_batch_size is 0"),
    "batches of one": (replace(CONFIG, max_batch_size=1), {}, "max_batch_size is 1"),
    "sequences": (replace(CONFIG, sequence=SequenceBatching()), {}, "sequence batching"),
    "ragged": (replace(CONFIG, unjoinable_inputs=("ITEM",)), {}, "'ITEM', which is ragged"),
    "cache": (replace(CONFIG, caches_responses=True), {}, "response_cache"),
    "may_omit": (replace(CONFIG, parameters=(("may_omit", "TEXT"),)), {}, "may omit the output 'TEXT'"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_coalescing_is_refused_with_a_reason(reason: str) -> None:
    config, keys, text = REFUSED[reason]
    with pytest.raises(PipelineMismatch) as caught:
        pipeline(config, **DECLARED | keys)
    assert caught.value.location == ("coalesce",)
    assert text in caught.value.text


def test_a_step_of_an_ensemble_that_does_not_batch_is_refused() -> None:
    step = replace(CONFIG, name="step", max_batch_size=0)
    outer = ensemble("outer", step)
    with pytest.raises(PipelineMismatch, match="model 'outer' does not batch"):
        pipeline(outer, step, **DECLARED)
    step, outer = replace(CONFIG, name="step", caches_responses=True), ensemble("outer", replace(CONFIG, name="step"))
    with pytest.raises(PipelineMismatch, match="model 'step' has a response_cache"):
        pipeline(outer, step, **DECLARED)


def coalescing_of(compiled: Pipeline) -> Coalescing:
    (coalescing,) = compiled.layers
    assert isinstance(coalescing, Coalescing)
    return coalescing


async def run_trial(engine: Engine, compiled: Pipeline) -> None:
    await coalescing_of(compiled).run_trial(engine, *trial_requests(compiled, Path()), 1.0)


def test_the_narrowest_step_limits_the_items() -> None:
    step = replace(CONFIG, name="step", max_batch_size=8)
    coalescing = coalescing_of(pipeline(ensemble("outer", replace(CONFIG, name="step")), step, **DECLARED))
    assert (coalescing.max_items, coalescing.steps) == (8, 1)
    given = {**DECLARED, "coalesce": {"max_items": 4, "max_bytes": 100, "tolerance": 0.5}}
    coalescing = coalescing_of(pipeline(CONFIG, **given))
    assert (coalescing.max_items, coalescing.max_bytes, coalescing.tolerance) == (4, 100, 0.5)
    assert pipeline(CONFIG, **{**DECLARED, "coalesce": False}).layers == ()


def test_oip_names_only_models_that_have_a_trial() -> None:
    document = {"pipelines": {"p": {"model": "m", "coalesce": True}}, "oip": {"coalesce": ["m"]}}
    assert GatewaySpec.model_validate(document).oip is not None
    with pytest.raises(ValidationError, match="'other', which is not the model of a pipeline with coalesce"):
        GatewaySpec.model_validate(document | {"oip": {"coalesce": ["other"]}})


async def tried(distort: Distort | None = None, *, engine: RowEngine | None = None, **keys: Any) -> Coalescing:
    compiled = pipeline(CONFIG, **DECLARED | keys)
    engine = engine or RowEngine(service_s=0)
    engine.distort = distort
    await run_trial(engine, compiled)
    return coalescing_of(compiled)


async def test_the_trial_of_a_faithful_model_passes() -> None:
    engine = RowEngine(service_s=0)
    coalescing = await tried(engine=engine)
    assert coalescing.is_on
    assert "1" in coalescing.proven
    assert "2" not in coalescing.proven
    alone = {item for call in engine.requests if len(items := items_of(call)) == 1 for item in items}
    assert len(alone) == 5, "the sample and four different inputs"
    assert engine.sizes[-2:] == [2, 16]
    assert set(items_of(engine.requests[-1])) == alone
    assert all(call.is_probe for call in engine.requests)


def numbered(outputs: Outputs) -> Outputs:
    """A list of all detections, one in each image, with the number of the image."""
    numbers = np.arange(len(rows_of(outputs)), dtype=np.int64)[:, np.newaxis]
    return outputs | {"BOXES": Tensor("BOXES", "INT64", numbers)}


@pytest.mark.parametrize(
    ("distort", "output"),
    [
        (with_rows(lambda items: items[::-1]), "NEGATIVE"),
        (with_rows(lambda items: [items[0], *items[:-1]]), "NEGATIVE"),
        (with_rows(lambda items: items[:1]), "NEGATIVE"),
        (with_rows(lambda items: [*items, 0]), "NEGATIVE"),
        (with_rows(lambda items: [items[0], *items[:-1]] if len(items) > 8 else items), "NEGATIVE"),
        (without_text, "TEXT"),
        (numbered, "BOXES"),
    ],
    ids=["swapped", "repeated", "dropped", "one too many", "repeated in large batches", "left out", "numbered"],
)
async def test_the_trial_finds_rows_that_depend_on_others(distort: Distort, output: str) -> None:
    coalescing = await tried(distort)
    assert not coalescing.is_on
    assert not coalescing.needs_trial
    assert coalescing.fault.tensor == output


turns = count()


@pytest.mark.parametrize(
    ("distort", "text"),
    [
        (
            lambda outputs: (
                outputs | {"NEGATIVE": Tensor("NEGATIVE", "INT64", outputs["NEGATIVE"].array + next(turns))}
            ),
            "between two runs of the sample alone",
        ),
        (lambda outputs: outputs_of([1] * len(rows_of(outputs))), "every input of the trial alike"),
    ],
    ids=["random", "constant"],
)
async def test_the_trial_needs_answers_that_differ_only_with_the_inputs(distort: Distort, text: str) -> None:
    assert text in str((await tried(distort)).fault)


async def test_the_trial_needs_inputs_that_the_model_accepts() -> None:
    engine = RowEngine(service_s=0, bad={*range(-10, 3), *range(4, 20)})
    assert "no input but the sample" in str((await tried(engine=engine)).fault)
    coalescing = await tried(engine=engine, examples={"other": {"ITEM": 40}})
    assert coalescing.is_on


async def test_rounding_may_differ_within_the_tolerance() -> None:
    def rounded(outputs: Outputs) -> Outputs:
        items = rows_of(outputs)
        exact = np.array([[item] for item in items], np.float32)
        return outputs | {"SCORE": Tensor("SCORE", "FP32", exact * np.float32(1 + 1e-6 * (len(items) > 1)))}

    assert (await tried(rounded)).fault is not None
    assert (await tried(rounded, coalesce={"tolerance": 1e-4})).is_on


async def test_a_model_that_cannot_be_called_is_tried_again() -> None:
    engine = RowEngine(service_s=0, error=UpstreamUnavailable("Triton cannot be reached."))
    compiled = pipeline(CONFIG, **DECLARED)
    with pytest.raises(GatewayError):
        await run_trial(engine, compiled)
    assert coalescing_of(compiled).needs_trial


class Tried(FakeEngine):
    """The catalog's engine: the configurations of a fake, and a model that works on rows."""

    def __init__(self) -> None:
        super().__init__({"m": CONFIG})
        self.rows = RowEngine(service_s=0)
        self.infer = self.rows.infer  # type: ignore[method-assign]


FILE = "pipelines:\n  p: {model: m, idempotent: true, coalesce: true, sample: {ITEM: 3}}\noip: {coalesce: [m]}\n"


async def test_the_trial_runs_with_the_sample_and_for_each_new_version(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(FILE)
    engine = Tried()
    catalog = Catalog(engine, tmp_path / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    await catalog.warm_up()
    assert catalog.is_ready
    coalescing = coalescing_of(catalog.pipeline("p"))
    assert coalescing.is_on
    assert catalog.layers_of("m") == (coalescing,)
    assert catalog.layers_of("other") == ()

    calls = len(engine.rows.requests)
    await catalog.refresh()
    await catalog.warm_up()
    assert len(engine.rows.requests) == calls, "nothing is new"

    engine.rows.version = "2"
    coalescing.saw("2")
    assert not coalescing.is_on
    await catalog.refresh()
    await catalog.warm_up()
    assert catalog.is_ready
    assert coalescing.is_on
    assert "2" in coalescing.proven
