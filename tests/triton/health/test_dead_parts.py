"""Dead processes and engines in models that Triton reports as ready, and streams that Triton will never continue."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import ModelError, ModelNotReady, Unavailable, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest
from app.core.model import ModelConfig, Step
from app.triton.health import health as health_module
from app.triton.health import health_watch as watch_module
from app.triton.health.health import ENGINE_RETRY_S, REPEATED, ModelDeclaration, ModelFault, TritonHealth
from tests.toolkit.triton import FakeTriton, piece
from tests.toolkit.waiting import until
from tests.toolkit.watches import WITHIN_S, Watched, watched_triton

PATTERNS = ["EngineCore encountered an issue", "EngineDeadError", r"LLM is shutting down"]
ENGINES = [
    "Error generating stream: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "vllm.v1.engine.exceptions.EngineDeadError",
    "Error generating request: LLM is shutting down",
]
PROCESS = "Stub process 'a_0_0' is not healthy."


@pytest.fixture
async def dying() -> AsyncIterator[Watched]:
    """Model ``a`` fails with the message of the test until it is loaded."""
    async with watched_triton(declared=ModelDeclaration(engine_errors=PATTERNS)) as triton:
        triton.server.loads_needed = 1
        await triton.engine.model_config("a")
        yield triton


DEATHS = [(PROCESS, ModelFault.PROCESS), (ENGINES[0], ModelFault.ENGINE)]
each_death = pytest.mark.parametrize(("message", "fault"), DEATHS, ids=["process", "engine"])


class TestErrors:
    @pytest.mark.parametrize("message", ENGINES)
    @pytest.mark.parametrize("streamed", [False, True])
    async def test_the_request_that_finds_a_dead_engine_may_be_repeated(
        self, dying: Watched, message: str, *, streamed: bool
    ) -> None:
        dying.server.message = message
        error = await dying.call(streamed=streamed)
        assert isinstance(error, ModelNotReady)
        assert (error.retryable, error.retry_after_s, error.was_answered) == (True, ENGINE_RETRY_S, True)
        assert message not in error.detail

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_another_message_stays_an_error_of_the_model(self, dying: Watched, *, streamed: bool) -> None:
        dying.server.message = "out of memory"
        assert type(await dying.call(streamed=streamed)) is ModelError
        dying.health.declared = lambda _: ModelDeclaration()  # a pipeline without engine_errors
        dying.server.message = ENGINES[0]
        assert type(await dying.call(streamed=streamed)) is ModelError
        assert not dying.health.suspects


@each_death
class TestWithASample:
    @pytest.fixture(autouse=True)
    def _die(self, dying: Watched, message: str) -> None:
        dying.server.message = message

    async def test_the_model_is_not_called_until_it_is_loaded_again(self, dying: Watched, fault: ModelFault) -> None:
        await dying.call()
        text, clause, retry_after_s = {
            ModelFault.PROCESS: ("A process that model 'a' needs has died.", "a process that it needs has died", 1),
            ModelFault.ENGINE: ("The engine of model 'a' has died.", "its engine has died", ENGINE_RETRY_S),
        }[fault]
        async with dying.watching("a"):
            await until(lambda: dying.dead == ["a"])
            assert not await dying.engine.model_ready("a")
            assert dying.engine.fault("a") == clause
            error = await dying.call()
            assert isinstance(error, ModelNotReady)
            assert (error.detail, error.retry_after_s, error.was_sent) == (text, retry_after_s, False)
            assert dying.server.control == []
            await dying.engine.reload_model("a")  # somebody loads it
            await until(lambda: not dying.dead)
        assert await dying.engine.model_ready("a")
        assert (await dying.call(), dying.engine.fault("a"), dying.begun) == (None, "", [(fault, "a")])

    @pytest.mark.parametrize("loads_needed", [1, 3])
    async def test_with_permission_it_is_loaded_until_it_works(
        self, dying: Watched, fault: ModelFault, caplog: pytest.LogCaptureFixture, loads_needed: int
    ) -> None:
        dying.server.loads_needed = loads_needed
        await dying.call()
        async with dying.watching("a", may_reload=True):
            await until(lambda: bool(dying.begun) and not dying.dead)
        assert (dying.server.control, dying.begun) == (["-a", "+a"] * loads_needed, [(fault, "a")])
        assert (await dying.engine.model_ready("a"), await dying.call()) == (True, None)
        assert "died, " in caplog.text

    async def test_a_text_that_a_sample_disproves_is_no_death(self, dying: Watched, fault: ModelFault) -> None:
        """A model may repeat the text of a caller in its error."""
        await dying.call(times=50)
        dying.server.message = ""  # the sample works
        async with dying.watching("a", may_reload=True):
            await until(lambda: not dying.health.suspects)
        assert (dying.begun, dying.server.control) == ([], [])

    async def test_a_triton_without_model_control_is_reported_once(
        self, dying: Watched, fault: ModelFault, caplog: pytest.LogCaptureFixture
    ) -> None:
        dying.server.refuses_control = True
        await dying.call()
        async with dying.watching("a", may_reload=True):
            await until(lambda: "--model-control-mode=explicit" in caplog.text)
            await asyncio.sleep(0.2)
            assert dying.dead == ["a"]
            dying.server.loads_needed = 0
            await until(lambda: not dying.dead)
        assert caplog.text.count("--model-control-mode=explicit") == 1


class TestWithoutASample:
    @each_death
    async def test_repeated_errors_confirm_it(self, dying: Watched, message: str, fault: ModelFault) -> None:
        dying.server.message = message
        for errors in range(1, REPEATED + 1):
            async with dying.watching():
                await dying.call()
                await asyncio.sleep(0.05)
            assert dying.begun == [(fault, "a")] * (errors == REPEATED)

    async def test_with_permission_it_is_loaded_again(self, dying: Watched) -> None:
        dying.server.message = PROCESS
        await dying.call(times=REPEATED)
        async with dying.watching(may_reload=True):
            await until(lambda: dying.server.control == ["-a", "+a"] and not dying.dead)

    async def test_an_answer_in_between_disproves_a_dead_engine(self, dying: Watched) -> None:
        dying.server.message = ENGINES[0]
        for _ in range(REPEATED):
            await dying.call()
            dying.server.loads_needed = 0
            assert await dying.call() is None
            dying.server.loads_needed = 1
        assert not dying.health.suspects

    async def test_one_request_at_a_time_tries_the_engine_again(self, dying: Watched) -> None:
        dying.server.message = ENGINES[0]
        async with dying.watching():
            await dying.call(times=REPEATED)
            await until(lambda: len(dying.begun) == 1)
            for deaths in (2, 3):
                await until(lambda: not dying.dead)
                await dying.call()
                await until(lambda deaths=deaths: len(dying.begun) == deaths)  # type: ignore[misc]
            dying.server.loads_needed = 0
            await until(lambda: not dying.dead)
            assert await dying.call() is None
            dying.server.loads_needed = 1
            await dying.call()
            await asyncio.sleep(0.1)
        assert len(dying.begun) == 3


async def test_below_an_ensemble_every_model_is_loaded_again(dying: Watched) -> None:
    """The message about an engine names no model."""
    dying.health.configs["chain"] = config("chain", "a", "other", platform="ensemble")
    dying.server.message = f"in ensemble 'chain', {ENGINES[0]}"
    await dying.call("chain")
    async with dying.watching("chain", may_reload=True):
        await until(lambda: len(dying.server.control) >= 4)
    assert dying.server.control[:4] == ["-a", "+a", "-other", "+other"]


def config(name: str, *steps: str, instances: int = 1, platform: str = "python") -> ModelConfig:
    return ModelConfig(
        name, platform, 0, (), (), steps=tuple(Step(step, "", (), ()) for step in steps), instance_count=instances
    )


DEAD = "Stub process '{}' is not healthy."


class TestSuspicion:
    """The ensemble ``whole`` runs ``part`` and ``inner``; ``inner`` runs ``part_two``; ``other`` is separate."""

    @pytest.fixture
    def health(self) -> TritonHealth:
        known = TritonHealth()
        for each in (
            config("whole", "part", "inner"),
            config("inner", "part_two"),
            config("part"),
            config("part_two", instances=3),
            config("other"),
        ):
            known.configs[each.name] = each
        return known

    @pytest.mark.parametrize(
        ("stub", "owner"),
        [
            ("part_0_0", "part"),
            ("part_two_1_0", "part_two"),
            ("part_0_gpu1", "part"),
            ("other_0_0", None),
            ("parts", None),
            ("", "whole"),
        ],
    )
    @pytest.mark.parametrize("text", ["in ensemble 'whole', {}", "the child failed: {} Sorry."])
    def test_the_error_names_a_model_that_the_called_model_runs(
        self, health: TritonHealth, text: str, stub: str, owner: str | None
    ) -> None:
        message = text.format(DEAD.format(stub) if stub else "Stub process is not healthy.")
        found = health.suspect("whole", message, time.monotonic())
        assert found == (None if owner is None else (ModelFault.PROCESS, owner))
        assert list(health.suspects) == ([] if owner is None else ["whole"])

    def test_errors_of_calls_before_a_repair_are_ignored(self, health: TritonHealth) -> None:
        """Triton answers a call to the old process up to 5 s later, when the model already has a new one."""
        began = time.monotonic()
        health.begin(ModelFault.PROCESS, "part")
        health.suspect("whole", DEAD.format("part_0_0"), began)
        health.revive("part")
        assert not health.suspects
        health.suspect("whole", DEAD.format("part_0_0"), began)
        assert not health.suspects
        health.suspect("whole", DEAD.format("part_0_0"), time.monotonic())
        assert health.suspects == {"whole": Counter({(ModelFault.PROCESS, "part"): 1})}

    async def test_repeated_errors_name_one_model(self, dying: Watched) -> None:
        dying.health.configs["whole"] = config("whole", "part", "inner")
        for stub in ("part_0_0", "part_0_0", "inner_0_0"):
            dying.health.suspect("whole", DEAD.format(stub), time.monotonic())
        async with dying.watching():
            await asyncio.sleep(0.05)
            assert dying.begun == []
            dying.health.suspect("whole", DEAD.format("part_0_0"), time.monotonic())
            await until(lambda: dying.begun == [(ModelFault.PROCESS, "part")])

    def test_a_dead_step_fails_every_model_that_uses_it(self, health: TritonHealth) -> None:
        health.begin(ModelFault.PROCESS, "part_two")
        names = ("whole", "inner", "part_two", "part", "other")
        assert [name for name in names if health.faults_of(name)] == ["whole", "inner", "part_two"]
        health.revive("part_two")
        assert not health.faults_of("whole")

    def test_instances_is_the_maximum_over_all_steps(self, health: TritonHealth) -> None:
        assert [health.instances(name) for name in ("whole", "other", "unknown")] == [3, 1, 1]

    def test_a_cycle_of_models_ends_the_search(self) -> None:
        health = TritonHealth()
        health.configs = {"a": config("a", "b"), "b": config("b", "a")}
        assert health.run_by("a") == ["b", "a"]


class Server(FakeTriton):
    """Sends one response and is silent then."""

    def __init__(self) -> None:
        super().__init__(streamed=self._streamed, ready={"m": "READY"}, completed_s={"m": [0.0]})
        self.goes_on = asyncio.Event()

    async def _streamed(
        self, request: pb.ModelInferRequest, context: object
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        yield piece(0)
        await self.goes_on.wait()
        yield piece(final=True)


class Reading:
    """A stream of model ``m`` that a task reads."""

    def __init__(self, triton: Watched) -> None:
        self.server = triton.server
        self.triton = triton
        self.health = triton.health
        self.outputs = 0
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _ in self.triton.engine.infer_stream(InferenceRequest("m", ()), Deadline.after(WITHIN_S)):
            self.outputs += 1

    async def begun(self) -> None:
        await until(lambda: self.outputs == 1 and bool(self.triton.engine.streams))

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def ended(self) -> None:
        await asyncio.wait({self._task})

    async def error(self) -> Unavailable:
        with pytest.raises(Unavailable) as caught:
            async with asyncio.timeout(WITHIN_S):
                await self._task
        return caught.value


@pytest.fixture(params=["asyncio", "grpcio"])
async def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reading]:
    monkeypatch.setattr(health_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(health_module, "LEAST_TIMEOUT_S", 0.05)
    async with watched_triton(Server(), kind=request.param) as triton:
        await triton.engine.model_config("m")
        found = Reading(triton)
        yield found
        found.server.goes_on.set()
        await found.ended()


async def test_the_stream_of_a_dead_process_ends(reading: Reading) -> None:
    async with reading.triton.watching():
        await reading.begun()
        reading.health.begin(ModelFault.PROCESS, "m")
        error = await reading.error()
    assert isinstance(error, ModelNotReady)
    assert error.retryable
    assert not reading.triton.engine.streams
    assert not reading.health.with_fault(ModelFault.OPEN)
    assert not reading.health.calls_of("m", "ModelStreamInfer").unanswered


async def test_a_repair_begins_after_the_streams_of_the_dead_process_have_ended(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload while they run can abort Triton 2.51."""
    monkeypatch.setattr(watch_module, "FIRST_DELAY_S", 1.0)
    async with reading.triton.watching(may_reload=True):
        await reading.begun()
        reading.health.begin(ModelFault.PROCESS, "m")
        await reading.error()
        assert reading.server.control == []
        await until(lambda: reading.server.control == ["-m", "+m"])


async def test_a_stream_that_began_after_the_death_goes_on(reading: Reading) -> None:
    await reading.begun()
    reading.health.begin(ModelFault.PROCESS, "m")
    reading.health.revive("m")
    later = Reading(reading.triton)
    await later.begun()
    async with reading.triton.watching():
        await reading.error()
        await asyncio.sleep(0.1)
        assert later.is_running
        reading.server.goes_on.set()
        await until(lambda: not later.is_running)
    assert later.outputs == 2


async def test_a_stream_of_a_model_that_was_reloaded_ends(reading: Reading) -> None:
    reading.server.completed_s["m"] = [0.0] * 5
    async with reading.triton.watching():
        await reading.begun()
        await asyncio.sleep(0.1)
        assert reading.is_running
        reading.server.completed_s["m"] = [0.0]
        assert isinstance(await reading.error(), ModelNotReady)


async def test_a_silent_stream_ends_when_triton_does_not_answer(
    reading: Reading, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def document(*_: object) -> dict[str, object]:
        return {}  # statistics of another server than Triton: the watch goes on

    monkeypatch.setattr(reading.triton.engine, "document", document)
    async with reading.triton.watching():
        await reading.begun()
        await until(lambda: "a background task failed" in caplog.text)
        reading.server.is_live = False
        assert isinstance(await reading.error(), UpstreamUnavailable)


async def test_a_silent_stream_of_a_working_triton_goes_on(reading: Reading) -> None:
    """It is examined again only after twice the silence."""
    async with reading.triton.watching():
        await reading.begun()
        await asyncio.sleep(0.6)
        assert reading.is_running
        assert 0 < reading.server.checks <= 4
        reading.server.goes_on.set()
        await until(lambda: not reading.is_running)


async def test_a_silent_stream_finds_a_dead_process(reading: Reading) -> None:
    """The sample meets the dead process: no other request is needed to find it."""
    await reading.begun()

    async def dead(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        raise AssertionError

    reading.server.unary = dead
    async with reading.triton.watching("m"):
        await until(lambda: reading.health.with_fault(ModelFault.PROCESS) == ["m"])
