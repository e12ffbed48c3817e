"""The catalog follows the file and the models: what changes applies whole and warm, what is broken keeps the old."""

import os
from pathlib import Path

import orjson
import pytest

from app.domain.errors import ModelError, ModelNotReady, UnknownPipeline
from app.pipelines.catalog import Catalog, State
from app.pipelines.file import ConfigError
from tests.fakes.engine import FakeEngine
from tests.fakes.models import ensemble, model, response, tensor

PLAIN = model("X FP32 [1]", "Y FP32 [1]", name="plain")
ANSWER = response(tensor("Y", "FP32", [0.5]))
FILE = "pipelines:\n  p: {model: plain}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.of(PLAIN, answers=[ANSWER])


def write(path: Path, text: str) -> None:
    """As an editor does; the time of change is moved on, however coarse the file system's clock is."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))


def remove(path: Path) -> None:
    path.unlink()


async def loaded(engine: FakeEngine, path: Path, text: str = FILE) -> Catalog:
    write(path, text)
    catalog = Catalog(engine, path)
    catalog.load_file()
    await turn(catalog)
    return catalog


async def turn(catalog: Catalog) -> None:
    """What the running gateway does over and over."""
    await catalog.refresh()
    await catalog.warm_up()


class TestFollowingTheModels:
    async def test_a_pipeline_is_served_once_its_model_is_ready(self, engine: FakeEngine, path: Path) -> None:
        engine.unready = {"plain"}
        catalog = await loaded(engine, path)
        assert not catalog.is_ready
        with pytest.raises(ModelNotReady, match="model not ready"):
            catalog.pipeline("p")
        engine.unready = set()
        await turn(catalog)
        assert catalog.is_ready
        assert catalog.pipeline("p").config == PLAIN

    async def test_before_the_first_refresh_nothing_is_ready(self, engine: FakeEngine, path: Path) -> None:
        write(path, FILE)
        catalog = Catalog(engine, path)
        catalog.load_file()
        assert not catalog.is_ready

    async def test_a_name_that_nobody_has(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        with pytest.raises(UnknownPipeline, match="did you mean 'p'"):
            catalog.pipeline("pp")
        with pytest.raises(UnknownPipeline) as caught:
            catalog.pipeline("<script>" * 1000)
        assert "script" not in caught.value.detail

    async def test_a_triton_that_is_gone_is_not_ready_and_comes_back(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        engine.is_up = False
        await turn(catalog)
        assert not catalog.triton_is_up
        assert not catalog.is_ready
        assert catalog.pipeline("p")
        engine.is_up = True
        await turn(catalog)
        assert catalog.is_ready

    async def test_a_model_with_another_signature_is_compiled_anew(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        engine.configs["plain"] = model("X FP32 [2]", "Y FP32 [1]", name="plain")
        await turn(catalog)
        assert catalog.pipeline("p").inputs[0].tensor.dims == (2,)

    async def test_the_same_signature_is_compiled_once(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        pipeline = catalog.pipeline("p")
        await turn(catalog)
        assert catalog.pipeline("p") is pipeline

    async def test_an_optional_pipeline_does_not_hold_up_readiness(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, FILE + "  q: {model: absent, readiness: optional}\n")
        assert catalog.is_ready
        catalog = await loaded(engine, path, FILE + "  q: {model: absent}\n")
        assert not catalog.is_ready

    async def test_a_step_that_cannot_be_read_holds_up_its_own_pipeline_only(
        self, engine: FakeEngine, path: Path
    ) -> None:
        engine.configs = {"whole": ensemble("whole", model("X FP32 [1]", "Y FP32 [1]", name="absent")), "plain": PLAIN}
        catalog = await loaded(engine, path, "pipelines:\n  a: {model: whole}\n  b: {model: plain}\n")
        assert catalog.entries["a"].state is State.MODEL_NOT_READY
        assert catalog.entries["b"].state is State.READY


class TestWithoutAFile:
    async def test_every_ready_model_is_served_by_its_name(self, engine: FakeEngine) -> None:
        engine.configs["other"] = model("X FP32 [1]", "Y FP32 [1]", name="other")
        engine.unready = {"other"}
        catalog = Catalog(engine)
        await turn(catalog)
        assert catalog.entries.keys() == {"plain"}
        assert catalog.is_ready
        engine.unready = {"plain"}
        await turn(catalog)
        assert catalog.entries.keys() == {"other"}

    async def test_a_model_that_has_no_json_form_is_left_aside(self, engine: FakeEngine) -> None:
        engine.configs["odd"] = model("X INVALID [1]", "Y FP32 [1]", name="odd")
        catalog = Catalog(engine)
        await turn(catalog)
        assert catalog.entries["odd"].state is State.MISCONFIGURED
        assert catalog.entries["plain"].state is State.READY

    async def test_models_stay_while_triton_is_away(self, engine: FakeEngine) -> None:
        catalog = Catalog(engine)
        await turn(catalog)
        engine.is_up = False
        await turn(catalog)
        assert catalog.entries.keys() == {"plain"}


class TestFollowingTheFile:
    async def test_a_change_applies_to_new_requests(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        write(path, FILE + "  q: {model: plain, timeout_s: 3}\n")
        await turn(catalog)
        assert catalog.pipeline("q").timeout_s == 3

    async def test_what_did_not_change_stays_as_it_is(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        pipeline = catalog.pipeline("p")
        write(path, FILE + "  q: {model: plain}\n")
        await turn(catalog)
        assert catalog.pipeline("p") is pipeline

    async def test_a_pipeline_that_is_taken_out_is_unknown(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, FILE + "  q: {model: plain}\n")
        write(path, FILE)
        await turn(catalog)
        with pytest.raises(UnknownPipeline):
            catalog.pipeline("q")

    @pytest.mark.parametrize(
        "broken",
        [
            "pipelines: [",
            "pipelines: {p: {model: plain, nonsense: 1}}",
            "pipelines:\n  p: {model: plain, inputs: {x: {tensor: NOPE}}}\n",
            FILE + "  q: {model: plain, outputs: {y: {tensor: NOPE}}}\n",
        ],
    )
    async def test_a_broken_change_keeps_the_old(self, engine: FakeEngine, path: Path, broken: str) -> None:
        catalog = await loaded(engine, path)
        pipeline = catalog.pipeline("p")
        write(path, broken)
        await turn(catalog)
        assert catalog.reload_failed
        assert catalog.pipeline("p") is pipeline
        assert catalog.entries.keys() == {"p"}
        assert catalog.is_ready
        write(path, FILE)
        await turn(catalog)
        assert not catalog.reload_failed

    async def test_a_file_that_is_away_for_a_moment_keeps_the_old(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        remove(path)
        await turn(catalog)
        assert catalog.reload_failed
        assert catalog.pipeline("p")

    async def test_a_changed_pipeline_is_warm_before_it_is_used(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        write(path, "pipelines:\n  p: {model: plain, timeout_s: 3, sample: {X: 1}}\n")
        await catalog.refresh()
        assert catalog.is_ready
        assert catalog.pipeline("p").timeout_s == 3
        assert len(engine.requests) == 1

    def test_a_broken_file_at_start_is_refused(self, engine: FakeEngine, path: Path) -> None:
        write(path, "pipelines: [")
        with pytest.raises(ConfigError):
            Catalog(engine, path).load_file()

    async def test_a_misfit_at_start_is_told_with_its_line(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, "pipelines:\n  p:\n    model: plain\n    outputs: {y: {tensor: NOPE}}\n")
        assert catalog.complaints == [
            f"{path}:4: pipelines.p.outputs.y.tensor 'NOPE' is no such tensor of the model; valid here: Y"
        ]
        with pytest.raises(ModelNotReady, match="misconfigured"):
            catalog.pipeline("p")

    async def test_a_complaint_is_logged_once(
        self, engine: FakeEngine, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        catalog = await loaded(engine, path, "pipelines:\n  p: {model: plain, outputs: {y: {tensor: NOPE}}}\n")
        await turn(catalog)
        assert len(caplog.records) == 1


class TestWarmingUp:
    async def test_the_sample_is_run_once(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, "pipelines:\n  p: {model: plain, sample: {X: 1.5}}\n")
        await turn(catalog)
        assert [request.inputs[0].array.tolist() for request in engine.requests] == [[1.5]]

    async def test_no_sample_or_no_warmup_runs_nothing(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, FILE + "  q: {model: plain, warmup: false, sample: {X: 1}}\n")
        assert catalog.is_ready
        assert engine.requests == []

    async def test_a_sample_that_fails_is_tried_again(self, engine: FakeEngine, path: Path) -> None:
        engine.answers = [ModelError("no")]
        catalog = await loaded(engine, path, "pipelines:\n  p: {model: plain, sample: {X: 1}}\n")
        assert catalog.entries["p"].state is State.WARMING
        assert not catalog.is_ready
        engine.answers = [ANSWER]
        await turn(catalog)
        assert catalog.is_ready

    @pytest.mark.parametrize(
        "sample", ["{Z: 1}", "{X: a}", "{X: 1.0e+300}", "{F: absent.png}", "{F: 5}", '{F: "a\\0"}']
    )
    async def test_a_sample_that_cannot_be_sent_is_complained_of(
        self, engine: FakeEngine, path: Path, sample: str
    ) -> None:
        engine.configs["plain"] = model(["X FP32 [1]", "F BYTES [1]"], "Y FP32 [1]", name="plain")
        inputs = "{X: {tensor: X}, F: {tensor: F, kind: binary}}"
        catalog = await loaded(engine, path, f"pipelines:\n  p: {{model: plain, inputs: {inputs}, sample: {sample}}}\n")
        assert catalog.entries["p"].state is State.WARMING
        assert "failed on its sample" in catalog.entries["p"].complaint

    async def test_files_of_a_sample_lie_beside_the_configuration(self, engine: FakeEngine, path: Path) -> None:
        engine.configs["plain"] = model("F BYTES [1]", "Y FP32 [1]", name="plain")
        (path.parent / "sample.bin").write_bytes(b"\0\1")
        text = "pipelines:\n  p: {model: plain, inputs: {f: {tensor: F, kind: binary}}, sample: {f: sample.bin}}\n"
        catalog = await loaded(engine, path, text)
        assert orjson.loads(catalog.sample_body(catalog.pipeline("p"))) == {"f": "AAE="}
        assert engine.requests[0].inputs[0].array.tolist() == [b"\0\1"]
