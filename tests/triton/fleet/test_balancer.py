"""The balancer selects a Triton for each request; the engines have scripted answers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from app.core.errors import (
    DeadlineExceeded,
    GatewayError,
    ModelError,
    ModelNotReady,
    UpstreamError,
    UpstreamUnavailable,
)
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, OpenSequence
from app.core.model import ModelConfig
from app.triton.fleet import balancer as module
from app.triton.fleet.balancer import Balancer, TritonServer
from app.triton.health.health import FAILURES, ModelFault
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model

PLAIN = model("X FP32 [1]", "Y FP32 [1]", name="m")
ANSWER = InferenceResponse({})
REQUEST = InferenceRequest("m", ())


def lost(*, was_sent: bool, code: str = "UNAVAILABLE") -> UpstreamUnavailable:
    error = UpstreamUnavailable("Triton cannot be reached.", was_sent=was_sent)
    error.upstream = UpstreamError(code, "scripted")
    return error


def unloaded() -> ModelNotReady:
    error = ModelNotReady("Triton has no ready version of the model.", was_sent=False)
    error.upstream = UpstreamError("NOT_FOUND", "scripted")
    return error


@dataclass
class Seen:
    ejections: list[tuple[str, str]] = field(default_factory=list)
    repeats: int = 0

    def changed(self, states: Mapping[str, str], ejected: str) -> None:
        if ejected:
            self.ejections.append((ejected, states[ejected]))

    def repeated(self) -> None:
        self.repeats += 1


def balanced(*engines: FakeEngine) -> tuple[Balancer, Seen]:
    seen = Seen()
    balancer = Balancer(seen.changed, seen.repeated)
    balancer.servers += [TritonServer(f"triton-{number}:1", engine) for number, engine in enumerate(engines)]
    return balancer, seen


def working() -> FakeEngine:
    return FakeEngine.of(PLAIN, answers=[ANSWER])


def failing(error: GatewayError) -> FakeEngine:
    return FakeEngine.of(PLAIN, answers=[error])


async def ask(balancer: Balancer, request: InferenceRequest = REQUEST, timeout_s: float = 5.0) -> InferenceResponse:
    return await balancer.infer(replace(request), Deadline.after(timeout_s))


async def streamed(balancer: Balancer, request: InferenceRequest = REQUEST) -> list[InferenceResponse]:
    async with aclosing(balancer.infer_stream(request, Deadline.after(5))) as responses:
        return [response async for response in responses]


class Held(FakeEngine):
    """Answers after the test sets ``may_answer``."""

    def __init__(self) -> None:
        super().__init__({"m": PLAIN})
        self.may_answer = asyncio.Event()

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        self.requests.append(request)
        await self.may_answer.wait()
        yield ANSWER


class TestPick:
    @pytest.mark.parametrize(
        ("calls", "returns", "least", "most"),
        [(20, False, 10, 10), (40, True, 1, 9)],
        ids=["the one with fewer requests is used", "a returning one gets few at first"],
    )
    async def test_the_shares_of_two_servers(self, calls: int, returns: bool, least: int, most: int) -> None:
        engines = Held(), Held()
        balancer, _ = balanced(*engines)
        if returns:
            balancer.servers[0].start_slowly()
        asked = [asyncio.create_task(ask(balancer)) for _ in range(calls)]
        await asyncio.sleep(0)
        assert least <= len(engines[0].requests) <= most
        for engine in engines:
            engine.may_answer.set()
        await asyncio.gather(*asked)
        assert [server.in_flight for server in balancer.servers] == [0, 0]

    async def test_three_servers_get_similar_shares(self) -> None:
        engines = working(), working(), working()
        balancer, _ = balanced(*engines)
        for _ in range(600):
            await ask(balancer)
        assert all(120 < len(engine.requests) < 280 for engine in engines)

    async def test_if_all_servers_are_ejected_all_are_used(self) -> None:
        engines = working(), working()
        balancer, _ = balanced(*engines)
        for server in balancer.servers:
            balancer.put_down(server)
        for _ in range(40):
            await ask(balancer)
        assert all(engine.requests for engine in engines)

    @pytest.mark.parametrize("fault", ["is leaving", "open breaker", "is stuck", "is down", "has not the model"])
    async def test_a_server_that_must_not_be_used_gets_no_requests(self, fault: str) -> None:
        engines = working(), working()
        balancer, _ = balanced(*engines)
        server = balancer.servers[0]
        server.is_leaving = fault == "is leaving"
        if fault == "is stuck":
            server.health.begin(ModelFault.STUCK, "")
        elif fault == "open breaker":
            trip(server)
        elif fault == "is down":
            balancer.put_down(server)
        elif fault == "has not the model":
            engines[0].configs = {}
            assert await balancer.model_ready("m")
            assert balancer.absences("m") == {"triton-0:1": "not_ready"}
        for _ in range(20):
            await ask(balancer)
        assert (len(engines[0].requests), len(engines[1].requests)) == (0, 20)

    async def test_without_servers_a_request_is_unavailable(self) -> None:
        with pytest.raises(UpstreamUnavailable):
            await ask(Balancer())


class TestRepeats:
    async def test_an_unsent_request_is_tried_on_every_server(self) -> None:
        engines = failing(lost(was_sent=False)), failing(lost(was_sent=False)), working()
        balancer, seen = balanced(*engines)
        for _ in range(30):
            assert await ask(balancer) == ANSWER
        assert sum(len(engine.requests) for engine in engines[:2]) == 2
        assert sorted(address for address, _ in seen.ejections) == ["triton-0:1", "triton-1:1"]

    @pytest.mark.parametrize(
        ("error", "servers", "idempotent", "sent"),
        [
            (lost(was_sent=True), 2, False, 1),
            (lost(was_sent=True), 3, True, 2),
            (lost(was_sent=True), 1, True, 2),
            (lost(was_sent=False), 3, False, 3),
            (ModelError("m"), 2, True, 1),
            (DeadlineExceeded("m"), 2, True, 1),
        ],
        ids=[
            "it may have run",
            "idempotent",
            "idempotent, one server",
            "no server is reached",
            "the model failed",
            "the deadline passed",
        ],
    )
    async def test_how_often_a_failing_request_is_sent(
        self, error: GatewayError, servers: int, idempotent: bool, sent: int
    ) -> None:
        engines = [failing(error) for _ in range(servers)]
        balancer, seen = balanced(*engines)
        with pytest.raises(type(error)):
            await ask(balancer, replace(REQUEST, idempotent=idempotent))
        assert (sum(len(engine.requests) for engine in engines), seen.repeats) == (sent, sent - 1)

    @pytest.mark.parametrize(("error", "idempotent"), [(lost(was_sent=True), True), (unloaded(), False)])
    async def test_another_server_answers(self, error: GatewayError, idempotent: bool) -> None:
        engines = failing(error), working()
        balancer, _ = balanced(*engines)
        for _ in range(20):
            assert await ask(balancer, replace(REQUEST, idempotent=idempotent)) == ANSWER
        assert len(engines[1].requests) == 20
        assert idempotent or len(engines[0].requests) <= 1

    async def test_servers_that_are_down_already_are_not_ejected_again(self) -> None:
        balancer, seen = balanced(failing(lost(was_sent=False)), failing(lost(was_sent=False)))
        for _ in range(3):
            with pytest.raises(UpstreamUnavailable):
                await ask(balancer)
        assert sorted(seen.ejections) == [("triton-0:1", "down"), ("triton-1:1", "down")]

    async def test_only_idempotent_requests_leave_a_failing_server(self) -> None:
        held = Held()
        balancer, _ = balanced(held)
        server = balancer.servers[0]
        movable = asyncio.create_task(ask(balancer, replace(REQUEST, idempotent=True)))
        staying = asyncio.create_task(ask(balancer))
        await asyncio.sleep(0)
        balancer.servers.append(TritonServer("triton-9:1", working()))
        balancer.put_down(server)
        assert await movable == ANSWER
        assert (movable.cancelling(), staying.done()) == (0, False)
        held.may_answer.set()
        assert await staying == ANSWER

    async def test_a_disconnect_does_not_count_as_a_server_failure(self) -> None:
        balancer, seen = balanced(Held(), working())
        balancer.servers[1].is_leaving = True
        call = asyncio.create_task(ask(balancer, replace(REQUEST, idempotent=True)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (seen.repeats, balancer.servers[0].in_flight) == (0, 0)


class TestStreams:
    async def test_an_unsent_stream_starts_on_another_server(self) -> None:
        engines = failing(lost(was_sent=False)), working()
        balancer, _ = balanced(*engines)
        for _ in range(10):
            assert await streamed(balancer) == [ANSWER]

    async def test_a_started_stream_is_not_moved(self) -> None:
        engines = [FakeEngine.of(PLAIN, answers=[ANSWER, lost(was_sent=False)]) for _ in range(2)]
        balancer, seen = balanced(*engines)
        with pytest.raises(UpstreamUnavailable):
            await streamed(balancer)
        assert (seen.repeats, sum(len(engine.requests) for engine in engines)) == (0, 1)

    async def test_a_cancel_call_goes_to_the_server_of_its_request(self) -> None:
        """If that is unknown, it goes everywhere."""
        for _ in range(10):
            engines = working(), working(), working()
            balancer, _ = balanced(*engines)
            request = replace(REQUEST, ends_by_hook=True)
            await ask(balancer, request)
            await streamed(balancer, InferenceRequest("stop", (), about=request.request_id))
            models = sorted([each.model for each in engine.requests] for engine in engines)
            assert models == [[], [], ["m", "stop"]]
        await streamed(balancer, InferenceRequest("stop", (), about="unknown"))
        assert sorted(len(engine.requests) for engine in engines) == [1, 1, 3]


async def test_open_breakers_of_all_servers_refuse_only_their_model() -> None:
    balancer, _ = balanced(working(), working())
    for server in balancer.servers:
        trip(server)
    with pytest.raises(UpstreamUnavailable, match="several times") as caught:
        await ask(balancer)
    assert caught.value.retry_after_s == 1
    assert await ask(balancer, InferenceRequest("other", ())) == ANSWER


def trip(server: TritonServer) -> None:
    for _ in range(FAILURES):
        server.health.failed("m", is_timeout=False)


class TestModels:
    async def test_a_model_is_ready_if_one_server_has_it(self) -> None:
        balancer, _ = balanced(FakeEngine(), working())
        assert await balancer.model_ready("m")
        assert await balancer.model_config("m") == PLAIN
        assert [state.ready for state in await balancer.models()] == [True]

    async def test_instances_of_all_servers_are_added(self) -> None:
        """They are not part of the signature."""
        more = ModelConfig("m", "python", 0, PLAIN.inputs, PLAIN.outputs, instance_count=4)
        balancer, _ = balanced(working(), working(), FakeEngine.of(more))
        assert (await balancer.model_config("m")).instance_count == 6
        assert balancer.absences("m") == {}
        balancer.put_down(balancer.servers[0])
        assert (await balancer.model_config("m")).instance_count == 6  # the server is expected to return
        balancer.servers[1].is_leaving = True
        assert (await balancer.model_config("m")).instance_count == 5

    async def test_another_signature_is_not_used_and_reported_once(self, caplog: pytest.LogCaptureFixture) -> None:
        other = model("X FP32 [2]", "Y FP32 [1]", name="m")
        engines = working(), FakeEngine.of(other, answers=[ANSWER]), working()
        balancer, _ = balanced(*engines)
        for _ in range(2):
            assert (await balancer.model_config("m")).inputs == PLAIN.inputs
            assert await balancer.model_ready("m")  # on that server too, which changes nothing
        for _ in range(20):
            await ask(balancer)
        assert len(engines[1].requests) == 0
        assert balancer.absences("m") == {"triton-1:1": "other_signature"}
        assert caplog.text.count("'m' at triton-1:1 has other inputs or outputs") == 1
        engines[1].configs["m"] = PLAIN
        await balancer.model_config("m")
        assert balancer.absences("m") == {}

    async def test_an_equal_vote_keeps_the_signature(self) -> None:
        other = model("X FP32 [2]", "Y FP32 [1]", name="m")
        engines = FakeEngine.of(other), working()
        balancer, _ = balanced(*engines)
        engines[0].is_up = False
        assert (await balancer.model_config("m")).inputs == PLAIN.inputs
        engines[0].is_up = True
        assert (await balancer.model_config("m")).inputs == PLAIN.inputs

    async def test_the_models_of_a_returning_server_are_read_first(self) -> None:
        engines = working(), working()
        balancer, _ = balanced(*engines)
        await balancer.model_config("m")
        engines[0].is_up = False
        assert await balancer.is_live()
        assert balancer.states() == {"triton-0:1": "down", "triton-1:1": "up"}
        engines[0].configs["m"] = model("X FP32 [3]", "Y FP32 [1]", name="m")
        engines[0].is_up = True
        assert await balancer.is_live()
        assert balancer.states() == {"triton-0:1": "up", "triton-1:1": "up"}
        assert balancer.absences("m") == {"triton-0:1": "other_signature"}

    async def test_a_silent_server_that_answers_other_calls_is_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Silent(FakeEngine):
            async def is_live(self) -> bool:
                await asyncio.sleep(60)
                return True

        monkeypatch.setattr(module, "LIVE_S", 0.05)
        balancer, _ = balanced(Silent(), working())
        busy = balancer.servers[0]
        look = asyncio.create_task(balancer.look_at(busy))
        await asyncio.sleep(0.01)
        busy.health.calls_of("m", "ModelInfer").heard_at = time.monotonic()
        await look
        assert busy.is_up
        assert await balancer.is_live()
        assert not busy.is_up


def step_at(address: str) -> InferenceRequest:
    return InferenceRequest("m", (), extensions=(OpenSequence(address),))


async def test_a_step_goes_to_the_triton_that_has_the_sequence() -> None:
    engines = [working() for _ in range(3)]
    balancer, _ = balanced(*engines)
    assert sorted(balancer.homes("m")) == ["triton-0:1", "triton-1:1", "triton-2:1"]
    for _ in range(20):
        await ask(balancer, step_at("triton-1:1"))
    assert [len(engine.requests) for engine in engines] == [0, 20, 0]


@pytest.mark.parametrize("was_sent", [False, True])
async def test_a_step_is_never_sent_again(*, was_sent: bool) -> None:
    engines = [failing(lost(was_sent=was_sent)), working()]
    balancer, seen = balanced(*engines)
    with pytest.raises(UpstreamUnavailable):
        await ask(balancer, step_at("triton-0:1"))
    with pytest.raises(UpstreamUnavailable):
        await streamed(balancer, step_at("triton-0:1"))
    assert (seen.repeats, engines[1].requests) == (0, [])
    assert was_sent or balancer.homes("m") == ["triton-1:1"]


async def test_a_triton_that_is_gone_takes_its_sequences_with_it() -> None:
    balancer, _ = balanced(working())
    request = step_at("other:1")
    with pytest.raises(UpstreamUnavailable):
        await ask(balancer, request)
    assert request.sequence is not None
    assert (request.sequence.is_lost, request.sequence.is_forgotten) == (True, True)
