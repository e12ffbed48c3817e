"""The catalog applies valid changes of the file and the models after a warm-up, and ignores invalid changes."""

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.config.document import ConfigError
from app.core.errors import ModelError, ModelNotReady, UnknownModel, UnknownPipeline
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.model import ModelConfig, SequenceBatching
from app.pipelines import catalog as catalog_module
from app.pipelines.catalog import Catalog, VersionState
from app.pipelines.examples import body_of
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import CancelSpec
from app.process.tritons import Declarations
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import ensemble, model, refusal, response, tensor

PLAIN = model("X FP32 [1]", "Y FP32 [1]", name="plain")
LLM = model("PROMPT BYTES [1]", "TEXT BYTES [1]", name="llm")
ANSWER = response(tensor("Y", "FP32", [0.5]))
FILE = "pipelines:\n  p: {model: plain}\n"
WITH_SAMPLE = "pipelines:\n  p: {model: plain, sample: {X: 1}}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.of(PLAIN, answers=[ANSWER])


def write(path: Path, text: str | None) -> None:
    """Writes the file with a later modification time, because the file system's clock may be coarse.

    None removes it.
    """
    before = path.stat().st_mtime_ns if path.exists() else 0
    if text is None:
        path.unlink()
        return
    path.write_text(text)
    os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))


async def loaded(engine: FakeEngine, path: Path, text: str = FILE) -> Catalog:
    write(path, text)
    catalog = Catalog(engine, path)
    catalog.load_file()
    await turn(catalog)
    return catalog


async def turn(catalog: Catalog) -> None:
    """Runs the periodic steps of the gateway once."""
    await catalog.refresh()
    await catalog.warm_up()


class TestFollowingTheModels:
    async def test_the_error_for_an_unknown_name_suggests_a_name(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        with pytest.raises(UnknownPipeline, match="did you mean 'p'"):
            catalog.pipeline("pp")
        with pytest.raises(UnknownPipeline) as caught:
            catalog.pipeline("<script>" * 1000)
        assert "script" not in caught.value.detail

    async def test_a_changed_signature_is_compiled_again(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        engine.configs["plain"] = model("X FP32 [2]", "Y FP32 [1]", name="plain")
        await turn(catalog)
        assert catalog.pipeline("p").inputs[0].tensor.dims == (2,)
        engine.configs["whole"] = ensemble("whole", PLAIN)
        write(path, "pipelines:\n  p: {model: whole}\n")
        for decoupled in (False, True):
            engine.configs["plain"] = dataclasses.replace(PLAIN, decoupled=decoupled)
            await turn(catalog)
            assert [step.config.decoupled for step in catalog.pipeline("p").graph.steps] == [decoupled]

    async def test_an_optional_pipeline_does_not_affect_readiness(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, FILE + "  q: {model: absent, readiness: optional}\n")
        assert catalog.is_ready
        catalog = await loaded(engine, path, FILE + "  q: {model: absent}\n")
        assert not catalog.is_ready


class TestWithoutAFile:
    async def test_every_ready_model_is_served_by_its_name(self, engine: FakeEngine) -> None:
        """An unloaded model is known until Triton's index no longer has it."""
        engine.configs["other"] = model("X FP32 [1]", "Y FP32 [1]", name="other")
        engine.unready = {"other"}
        catalog = Catalog(engine)
        await turn(catalog)
        assert catalog.entries.keys() == {"plain"}
        assert (catalog.oip_models.names, catalog.models) == (["plain"], {"plain": True})
        assert catalog.is_ready
        engine.unready = set()
        await turn(catalog)
        assert catalog.models == {"plain": True, "other": True}
        engine.unready = {"plain"}
        await turn(catalog)
        assert (catalog.entries.keys(), catalog.models) == ({"other"}, {"plain": False, "other": True})
        del engine.configs["plain"]
        await turn(catalog)
        assert catalog.models == {"other": True}
        engine.is_up = False
        await turn(catalog)
        assert catalog.entries.keys() == {"other"}


class TestFollowingTheFile:
    async def test_a_change_applies_to_the_pipelines_that_it_changes(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, FILE + "  r: {model: plain}\n")
        pipeline = catalog.pipeline("p")
        write(path, FILE + "  q: {model: plain, timeout_s: 3}\n")
        await turn(catalog)
        assert catalog.pipeline("p") is pipeline
        assert catalog.pipeline("q").timeout_s == 3
        with pytest.raises(UnknownPipeline):
            catalog.pipeline("r")

    @pytest.mark.parametrize(
        "broken",
        [
            "pipelines: [",
            "pipelines: {p: {model: plain, nonsense: 1}}",
            "pipelines: {}",
            "pipelines: {p: " + "[" * 20_000,
            pytest.param(None, id="removed"),
        ],
    )
    async def test_an_invalid_file_keeps_the_last_valid_version(
        self, engine: FakeEngine, path: Path, broken: str | None
    ) -> None:
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

    async def test_a_changed_pipeline_is_warmed_up_before_use(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        write(path, "pipelines:\n  p: {model: plain, timeout_s: 3, sample: {X: 1}}\n")
        await catalog.refresh()
        assert catalog.is_ready
        assert catalog.pipeline("p").timeout_s == 30
        await catalog.warm_up()
        assert catalog.pipeline("p").timeout_s == 3
        assert len(engine.requests) == 1

    def test_an_invalid_file_at_start_is_an_error(self, engine: FakeEngine, path: Path) -> None:
        write(path, "pipelines: [")
        with pytest.raises(ConfigError):
            Catalog(engine, path).load_file()

    async def test_a_mismatch_at_start_is_reported_with_its_line(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, "pipelines:\n  p:\n    model: plain\n    outputs: {y: {tensor: NOPE}}\n")
        assert catalog.complaints == [
            f"{path}:4: pipelines.p.outputs.y.tensor 'NOPE' is not a tensor of the model; valid here: Y"
        ]
        assert catalog.entries["p"].state_detail == (
            "It does not match its model: outputs.y.tensor 'NOPE' is not a tensor of the model; valid here: Y."
        )
        with pytest.raises(ModelNotReady, match="misconfigured"):
            catalog.pipeline("p")


class TestReloading:
    """Each pipeline is reloaded separately; a pipeline that cannot be served keeps its last valid version."""

    @pytest.mark.parametrize(
        ("broken", "expected"),
        [
            (
                "  p: {model: plane}\n",
                "2: pipelines.p.model 'plane' is not a model in Triton's repository; did you mean",
            ),
            ("  p: {model: plain, sample: {X: 1}}\n", "2: pipelines.p.sample failed: no"),
            ("  p: {model: plain, sample: {X: a}}\n", "2: pipelines.p.sample failed: 'X' must be"),
            (
                "  p: {model: plain, inputs: {x: {tensor: NOPE}}}\n",
                "2: pipelines.p.inputs.x.tensor 'NOPE' is not a tensor",
            ),
            (
                "  p: {model: plain, parameters: {X: {type: integer}}}\n",
                "2: pipelines.p.parameters.X has the same name",
            ),
        ],
    )
    async def test_an_unservable_pipeline_keeps_its_last_valid_version(
        self, engine: FakeEngine, path: Path, caplog: pytest.LogCaptureFixture, broken: str, expected: str
    ) -> None:
        catalog = await loaded(engine, path, FILE + "  q: {model: plain}\n")
        pipeline = catalog.pipeline("p")
        engine.answers = [ModelError("no")]
        write(path, f"pipelines:\n{broken}  q: {{model: plain, timeout_s: 3}}\n")
        for _ in range(3):
            await turn(catalog)
        assert catalog.is_ready
        assert catalog.pipeline("p") is pipeline
        assert catalog.entries["p"].state_detail is None
        assert catalog.pipeline("q").timeout_s == 3
        assert catalog.reload_failed
        (problem,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert problem.startswith(f"{path}:{expected}")
        assert problem.endswith(" (the last valid version stays active)")

    async def test_a_changed_pipeline_is_applied_when_its_model_is_ready(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        pipeline = catalog.pipeline("p")
        for text, has_failed in (("pipelines:\n  p: {model: later}\n", True), (FILE, False)):  # and a reverted change
            write(path, text)
            await turn(catalog)
            assert (catalog.reload_failed, catalog.pipeline("p") is pipeline) == (has_failed, True)
        write(path, "pipelines:\n  p: {model: later}\n")
        await turn(catalog)
        engine.configs["later"] = dataclasses.replace(PLAIN, name="later")
        await turn(catalog)
        assert catalog.pipeline("p").config.name == "later"
        assert not catalog.reload_failed

    async def test_an_added_pipeline_affects_readiness_once_served(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        write(path, FILE + "  q: {model: later}\n")
        await turn(catalog)
        assert catalog.is_ready
        assert catalog.reload_failed
        with pytest.raises(ModelNotReady, match=r"model not ready\. Triton has no model 'later'"):
            catalog.pipeline("q")
        engine.configs["later"] = dataclasses.replace(PLAIN, name="later")
        await turn(catalog)
        assert catalog.pipeline("q")
        assert not catalog.reload_failed
        engine.unready = {"later"}
        await turn(catalog)
        assert not catalog.is_ready

    async def test_an_added_pipeline_answers_after_its_sample(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path)
        write(path, FILE + "  q: {model: plain, sample: {X: 1}}\n")
        await catalog.refresh()
        with pytest.raises(ModelNotReady, match=r"warming\. Its sample is still running"):
            catalog.pipeline("q")
        await turn(catalog)
        assert catalog.pipeline("q")

    async def test_a_pipeline_that_was_never_served_changes_at_once(self, engine: FakeEngine, path: Path) -> None:
        catalog = await loaded(engine, path, "pipelines:\n  p: {model: absent}\n")
        assert catalog.entries["p"].state_detail == "Triton has no model 'absent'."
        write(path, "pipelines:\n  p: {model: plane}\n")
        await turn(catalog)
        assert catalog.entries["p"].state_detail == "Triton has no model 'plane'; did you mean 'plain'?"
        assert not catalog.is_ready
        write(path, FILE)
        await turn(catalog)
        assert catalog.is_ready

    async def test_an_unexpected_read_error_is_retried(
        self, engine: FakeEngine, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        catalog = await loaded(engine, path)
        with monkeypatch.context() as patched:
            patched.setattr("app.pipelines.file.read_spec", lambda *_: 1 / 0)
            write(path, FILE + "  q: {model: plain}\n")
            for _ in range(3):
                await turn(catalog)
            assert catalog.reload_failed
            assert [bool(record.exc_info) for record in caplog.records if record.levelname == "ERROR"] == [True]
        write(path, FILE + "  q: {model: plain}\n")
        await turn(catalog)
        assert not catalog.reload_failed
        assert catalog.pipeline("q")

    async def test_an_unexpected_compile_error_affects_one_pipeline(
        self, engine: FakeEngine, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def compiled(name: str, *rest: Any) -> Pipeline:
            assert name != "q", "a bug"
            return Pipeline(name, *rest)

        catalog = await loaded(engine, path)
        monkeypatch.setattr("app.pipelines.catalog.Pipeline", compiled)
        write(path, FILE + "  q: {model: plain}\n  r: {model: plain}\n")
        await turn(catalog)
        assert catalog.entries["q"].state is VersionState.MISCONFIGURED
        assert "bug" not in f"{catalog.entries['q'].state_detail}"
        assert catalog.pipeline("r")
        assert catalog.reload_failed
        assert "Traceback" in caplog.text

    @pytest.mark.parametrize("broken", [b"\xff", b"{{", None], ids=["not UTF-8", "not a template", "deleted"])
    async def test_a_changed_template_is_followed_unless_it_is_broken(self, path: Path, broken: bytes | None) -> None:
        template = path.parent / "chat.jinja"
        write(template, "A: {{ messages[0].content }}")
        text = "pipelines:\n  p: {model: llm, openai: {chat: {prompt: PROMPT, text: TEXT, template: chat.jinja}}}\n"
        catalog = await loaded(FakeEngine.of(LLM), path, text)
        write(template, "B: {{ messages[0].content }}")
        await turn(catalog)
        assert self.prompt(catalog) == "B: Hello"
        before = catalog.pipeline("p")
        await turn(catalog)
        assert catalog.pipeline("p") is before, "nothing changed since"
        template.unlink()
        if broken is not None:
            template.write_bytes(broken)
        await turn(catalog)
        assert (self.prompt(catalog), catalog.reload_failed) == ("B: Hello", True)
        template.unlink(missing_ok=True)
        template.write_text("C: {{ messages[0].content }}")
        await turn(catalog)
        assert (self.prompt(catalog), catalog.reload_failed) == ("C: Hello", False)

    async def test_a_changed_tokenizer_folder_is_followed(self, path: Path) -> None:
        folder = path.parent / "llama"
        folder.mkdir()
        write(folder / "tokenizer_config.json", '{"chat_template": "A: {{ messages[0].content }}"}')
        text = "pipelines:\n  p: {model: llm, openai: {chat: {prompt: PROMPT, text: TEXT, tokenizer: llama}}}\n"
        catalog = await loaded(FakeEngine.of(LLM), path, text)
        assert self.prompt(catalog) == "A: Hello"
        write(folder / "chat_template.jinja", "B: {{ messages[0].content }}")
        await turn(catalog)
        assert self.prompt(catalog) == "B: Hello"
        write(folder / "chat_template.jinja", "{{")
        await turn(catalog)
        assert (self.prompt(catalog), catalog.reload_failed) == ("B: Hello", True)
        problem = catalog._coming["p"].problem
        assert "chat.tokenizer cannot be used: chat_template.jinja is not a template: line 1: " in problem
        (folder / "chat_template.jinja").unlink()
        (folder / "additional_chat_templates").mkdir()
        write(folder / "additional_chat_templates" / "default.jinja", "C: {{ messages[0].content }}")
        await turn(catalog)
        assert (self.prompt(catalog), catalog.reload_failed) == ("C: Hello", False)
        write(folder / "additional_chat_templates" / "default.jinja", "D: {{ messages[0].content }}")
        await turn(catalog)
        assert self.prompt(catalog) == "D: Hello"

    @staticmethod
    def prompt(catalog: Catalog) -> str:
        openai = catalog.pipeline("p").openai
        return openai.chat.template.render([{"role": "user", "content": "Hello"}])

    async def test_a_changed_symbolic_link_is_followed(self, engine: FakeEngine, path: Path) -> None:
        """Kubernetes updates a ConfigMap like this: the file is a link into a folder that is also a link."""
        for number, text in enumerate((FILE, FILE.replace("p:", "q:"))):
            (path.parent / f"data{number}").mkdir()
            (path.parent / f"data{number}" / path.name).write_text(text)
            os.utime(path.parent / f"data{number}" / path.name, ns=(1, 1))
        data = path.parent / "data"
        data.symlink_to("data0")
        path.symlink_to(f"data/{path.name}")  # noqa: ASYNC240 - a short blocking call of the test
        catalog = Catalog(engine, path)
        catalog.load_file()
        (path.parent / "swap").symlink_to("data1")
        (path.parent / "swap").rename(data)
        await turn(catalog)
        assert catalog.entries.keys() == {"q"}


class TestAskingTriton:
    async def test_models_are_requested_concurrently_and_once_each(self, path: Path) -> None:
        names = [f"m{n}" for n in range(9)]
        engine = WaitingEngine.of(*(dataclasses.replace(PLAIN, name=name) for name in names))
        engine.together = 9
        lines = [f"  {name}: {{model: {name}}}\n  again_{name}: {{model: {name}}}\n" for name in names]
        catalog = await loaded(engine, path, "pipelines:\n" + "".join(lines))
        assert catalog.is_ready
        assert sorted(engine.asked) == names

    async def test_only_the_file_is_followed_while_triton_is_down(self, path: Path) -> None:
        engine = WaitingEngine.of(PLAIN)
        engine.is_up = False
        catalog = await loaded(engine, path)
        assert engine.asked == []
        assert catalog.entries["p"].state_detail == "Triton does not answer."
        write(path, FILE.replace("p:", "q:"))
        await catalog.follow_file()
        assert catalog.entries.keys() == {"q"}

    async def test_a_pipeline_added_during_a_call_is_read_at_the_next(self, path: Path) -> None:
        engine = WaitingEngine.of(PLAIN, dataclasses.replace(PLAIN, name="other"))
        catalog = await loaded(engine, path)
        engine.together = 99
        asking = asyncio.create_task(catalog.follow_models())
        await asyncio.sleep(0)
        write(path, FILE + "  q: {model: other}\n")
        await catalog.follow_file()
        engine.together = 1
        await asking
        assert catalog.entries["q"].state_detail == "Its model has not been seen yet."
        await turn(catalog)
        assert catalog.pipeline("q")

    @pytest.mark.parametrize(
        ("faulty", "detail", "problem"),
        [
            (
                {"unready": {"plain"}, "faults": {"plain": "its engine has died"}},
                "Model 'plain' does not work: its engine has died.",
                "'plain' is loaded, but its engine has died",
            ),
            (
                {"unready": {"plain"}, "reason": "no module named 'torch' in /models"},
                "Triton has not loaded model 'plain'.",
                "Triton says: no module named 'torch'",
            ),
            ({"odd": {"plain"}}, "The configuration of model 'plain' cannot be read.", "ZeroDivisionError"),
            (
                {"configs": {"plain": ensemble("plain", dataclasses.replace(PLAIN, name="plane"))}},
                "Triton has no model 'plane', which 'plain' runs; did you mean 'plain'?",
                "pipelines.p.model 'plane', which 'plain' runs is not a model",
            ),
        ],
        ids=["fault", "reason", "configuration", "step"],
    )
    async def test_the_reason_for_a_missing_model_is_shown_and_logged(
        self, path: Path, caplog: pytest.LogCaptureFixture, faulty: dict[str, Any], detail: str, problem: str
    ) -> None:
        engine = WaitingEngine.of(PLAIN, dataclasses.replace(PLAIN, name="other"))
        for name, value in faulty.items():
            setattr(engine, name, value if name != "configs" else engine.configs | value)
        catalog = await loaded(engine, path, FILE + "  q: {model: other}\n")
        assert catalog.entries["p"].state_detail == detail
        assert problem in caplog.text
        assert catalog.entries["q"].state is VersionState.READY

    async def test_loss_and_return_of_triton_are_logged_once_each(
        self, engine: FakeEngine, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        catalog = await loaded(engine, path)
        caplog.clear()
        for is_up in (True, False, False, True, True):
            engine.is_up = is_up
            await turn(catalog)
            assert (catalog.triton_is_up, catalog.is_ready, bool(catalog.pipeline("p"))) == (is_up, is_up, True)
        assert [record.message for record in caplog.records] == ["Triton stopped answering", "Triton answers"]


@dataclasses.dataclass
class WaitingEngine(FakeEngine):
    """Answers when ``together`` models have been requested. Reading a model in ``odd`` raises an exception."""

    together: int = 1
    asked: list[str] = dataclasses.field(default_factory=list)
    odd: set[str] = dataclasses.field(default_factory=set)

    async def model_ready(self, model: str, version: str = "") -> bool:
        self.asked.append(model)
        while len(self.asked) < self.together:
            await asyncio.sleep(0)
        return await super().model_ready(model, version)

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        if model in self.odd:
            raise ZeroDivisionError
        return self.configs[model]


class TestWarmingUp:
    async def test_the_sample_is_run_once_unless_warmup_is_off(self, engine: FakeEngine, path: Path) -> None:
        others = "  q: {model: plain, warmup: false, sample: {X: 1}}\n  r: {model: plain, sample: {X: 1.5}}\n"
        catalog = await loaded(engine, path, FILE + others)
        await turn(catalog)
        assert catalog.is_ready
        assert [request.inputs[0].array.tolist() for request in engine.requests] == [[1.5]]

    async def test_the_sample_of_a_session_does_not_take_the_place_of_a_caller(self, path: Path) -> None:
        engine = FakeEngine.of(dataclasses.replace(PLAIN, sequence=SequenceBatching("UINT64", idle_s=60.0)))
        catalog = await loaded(engine, path, "pipelines:\n  p: {model: plain, session: true, sample: {X: 1.5}}\n")
        assert catalog.is_ready
        assert engine.requests == []
        assert Declarations(catalog).canaries() == {}

    async def test_a_failed_sample_is_retried_later(self, engine: FakeEngine, path: Path) -> None:
        engine.answers = [ModelError("no")]
        catalog = await loaded(engine, path, WITH_SAMPLE)
        for _ in range(10):
            await turn(catalog)
        assert len(engine.requests) == 1
        assert catalog.entries["p"].state is VersionState.WARMING
        assert catalog.entries["p"].state_detail == "Its sample failed; see the log for the cause."
        assert not catalog.is_ready
        engine.answers = [ANSWER]
        catalog.entries["p"].retry_now()
        await turn(catalog)
        assert catalog.is_ready
        assert catalog.entries["p"].state_detail is None

    async def test_the_message_of_the_model_is_logged_and_not_shown(
        self, engine: FakeEngine, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.answers = [refusal("no such key: /opt/weights\nTraceback")]
        catalog = await loaded(engine, path, WITH_SAMPLE)
        (record,) = caplog.records
        assert record.message == (
            f"{path}:2: pipelines.p.sample failed: Model 'model' failed."
            "; the model says: no such key: /opt/weights Traceback"
        )
        assert "weights" not in f"{catalog.entries['p'].state_detail}"
        for instance in (0, 1):  # the same failure of another instance is not logged again
            engine.answers = [refusal(f"Failed for model 'plain_0_{instance}': no ink")]
            catalog.entries["p"].retry_now()
            await turn(catalog)
        assert (len(engine.requests), len(caplog.records)) == (3, 1)
        engine.answers = [refusal("no paper")]
        engine.configs["plain"] = dataclasses.replace(PLAIN, max_batch_size=4)
        await turn(catalog)
        assert [record.message.rpartition(": ")[2] for record in caplog.records[1:]] == ["no paper"]

    @pytest.mark.parametrize("occasion", ["another model", "a reload", "Triton's return", "the file"])
    async def test_a_change_retries_the_sample_at_once(self, engine: FakeEngine, path: Path, occasion: str) -> None:
        engine.answers = [ModelError("no")]
        catalog = await loaded(engine, path, WITH_SAMPLE)
        engine.answers = [ANSWER]
        if occasion == "another model":
            engine.configs["plain"] = dataclasses.replace(PLAIN, instance_count=2)
        elif occasion == "the file":
            write(path, WITH_SAMPLE + "# another line\n")
        else:
            engine.unready, engine.is_up = ({"plain"}, True) if occasion == "a reload" else (set(), False)
            await turn(catalog)
            engine.unready, engine.is_up = set(), True
        await turn(catalog)
        assert catalog.is_ready

    async def test_an_unanswered_sample_does_not_delay_other_work(
        self, engine: FakeEngine, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalog_module, "SAMPLES_WAIT_S", 0.01)
        engine.answers = [60.0]
        catalog = await loaded(engine, path, WITH_SAMPLE)
        write(path, FILE + "  q: {model: plain}\n")
        await turn(catalog)
        assert catalog.is_ready
        assert catalog.pipeline("q")
        await asyncio.sleep(0)
        assert engine.closed == len(engine.requests) == 1

    @pytest.mark.parametrize(
        "sample", ["{Z: 1}", "{X: a}", "{X: 1.0e+300}", "{F: absent.png}", "{F: 5}", '{F: "a\\0"}']
    )
    async def test_an_invalid_sample_is_reported(
        self, engine: FakeEngine, path: Path, sample: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.configs["plain"] = model(["X FP32 [1]", "F BYTES [1]"], "Y FP32 [1]", name="plain")
        inputs = "{X: {tensor: X}, F: {tensor: F, kind: binary}}"
        catalog = await loaded(engine, path, f"pipelines:\n  p: {{model: plain, inputs: {inputs}, sample: {sample}}}\n")
        assert catalog.entries["p"].state is VersionState.WARMING
        assert catalog.entries["p"].state_detail == "Its sample failed; see the log for the cause."
        assert "pipelines.p.sample failed: " in caplog.text

    async def test_sample_files_are_relative_to_the_configuration(self, engine: FakeEngine, path: Path) -> None:
        engine.configs["plain"] = model("F BYTES [1]", "Y FP32 [1]", name="plain")
        (path.parent / "sample.bin").write_bytes(b"\0\1")
        text = "pipelines:\n  p: {model: plain, inputs: {f: {tensor: F, kind: binary}}, sample: {f: sample.bin}}\n"
        catalog = await loaded(engine, path, text)
        assert orjson.loads(body_of(catalog.pipeline("p"), {"f": "sample.bin"}, catalog.folder)) == {"f": "AAE="}
        assert engine.requests[0].inputs[0].array.tolist() == [b"\0\1"]


async def test_more_instances_of_a_model_keep_it_ready(engine: FakeEngine, path: Path) -> None:
    catalog = await loaded(engine, path, WITH_SAMPLE)
    engine.configs["plain"] = dataclasses.replace(PLAIN, instance_count=3)
    await catalog.refresh()
    assert (catalog.is_ready, catalog.pipeline("p").config.instance_count) == (True, 3)


async def test_a_pipeline_does_not_wait_for_the_samples_of_others(path: Path) -> None:
    class Slow(FakeEngine):
        async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
            if request.model == "slow":
                await asyncio.sleep(60)
            return await super().infer(request, deadline)

    slow = dataclasses.replace(PLAIN, name="slow")
    write(path, WITH_SAMPLE + "  q: {model: slow, sample: {X: 1}}\n")
    catalog = Catalog(Slow.of(PLAIN, slow, answers=[ANSWER]), path)
    catalog.load_file()
    await catalog.refresh()
    warming = asyncio.create_task(catalog.warm_up())
    async with asyncio.timeout(catalog_module.SAMPLES_WAIT_S / 2):
        while catalog.entries["p"].state is not VersionState.READY:
            await asyncio.sleep(0.001)
    assert catalog.entries["q"].state is VersionState.WARMING
    warming.cancel()
    catalog.stop()


OVER_A = "pipelines: {p: {model: a, warmup: false}}\n"


async def catalog_of(folder: Path, oip: str, pipeline: str = OVER_A) -> Catalog:
    (folder / "gateway.yaml").write_text(pipeline + oip)
    engine = FakeEngine.of(*(model("X FP32 [1]", "Y FP32 [1]", name=name) for name in "abc"))
    catalog = Catalog(engine, folder / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    return catalog


@pytest.mark.parametrize(
    ("oip", "exposed"),
    [("", "a"), ("oip: {}", "a"), ("oip: {models: [c]}", "ac"), ("oip: {models: all}", "abc")],
)
async def test_models_of_pipelines_and_of_the_key_oip_are_exposed(tmp_path: Path, oip: str, exposed: str) -> None:
    catalog = await catalog_of(tmp_path, oip)
    assert "".join(catalog.oip_models.names) == exposed
    assert [catalog.oip_models.model(name).config.name for name in exposed] == list(exposed)
    with pytest.raises(UnknownModel):
        catalog.oip_models.model("d")


async def test_requests_follow_the_pipelines_over_their_model(tmp_path: Path) -> None:
    cancel = "idempotent: true, cancel: {model: b, input: X}"
    catalog = await catalog_of(tmp_path, "oip: {models: [c]}", OVER_A.replace("warmup: false", cancel))
    rules = catalog.oip_models.model("a").spec
    assert (rules.idempotent, rules.cancel) == (True, CancelSpec(model="b", input="X"))
    rules = catalog.oip_models.model("c").spec
    assert (rules.idempotent, rules.cancel) == (False, None)


async def test_a_changed_file_changes_the_exposed_models(tmp_path: Path) -> None:
    catalog = await catalog_of(tmp_path, "oip: {models: [c]}")
    (tmp_path / "gateway.yaml").write_text(OVER_A + "oip: {models: [b]}")
    await catalog.follow_file()
    with pytest.raises(ModelNotReady):
        catalog.oip_models.model("b")  # until the next read of Triton's models
    await catalog.follow_models()
    assert catalog.oip_models.model("b").config.name == "b"
    assert "c" not in catalog.oip_models


async def test_a_configuration_stays_the_same_object_until_it_changes(tmp_path: Path) -> None:
    catalog = await catalog_of(tmp_path, "")
    known = catalog.oip_models.model("a").config
    catalog.engine.configs["a"] = model("X FP32 [1]", "Y FP32 [1]", name="a")
    await catalog.follow_models()
    assert catalog.oip_models.model("a").config is known


async def test_a_model_that_is_not_ready_keeps_its_configuration(tmp_path: Path) -> None:
    catalog = await catalog_of(tmp_path, "oip: {models: [c, d]}")
    with pytest.raises(ModelNotReady):
        catalog.oip_models.model("d")  # was never ready
    catalog.engine.unready.add("c")
    await catalog.follow_models()
    catalog.engine.is_up = False
    await catalog.follow_models()
    assert catalog.oip_models.model("c").config.name == "c"
