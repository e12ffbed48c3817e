"""The limits adapt to measurements, that of a decoupled model to first outputs. Clients and models are simulated."""

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

import pytest

from app.admission.admission import Admission, Share
from app.admission.keys import ANYONE
from app.admission.limit import COLD_STREAMS, STREAMS, Limit, StreamLimit, ThroughputLimit
from app.admission.scheduler import PipelineAdmission, Slot
from app.core.errors import TooManyRequests
from app.core.inference import Deadline
from app.core.model import Capacity
from tests.toolkit.simulated_clock import simulated

Service = Callable[[int], float]
"""The duration of each request in seconds, for a number of running requests."""


def fifo(instances: int, service_s: float) -> Service:
    """Instances that each take one request at a time."""
    return lambda running: service_s * max(running / instances, 1.0)


def batching(instances: int, first_s: float, next_s: float, largest: int) -> Service:
    """Instances with dynamic batching: a batch takes ``first_s``, and ``next_s`` for each further request."""

    def duration(running: int) -> float:
        batch = max(min(running // (2 * instances), largest), 1)
        batch_s = first_s + next_s * (batch - 1)
        return batch_s * max(running / (batch * instances), 1.0)

    return duration


def under_load(limit: ThroughputLimit, service: Service, answers: int = 4000, noise: float = 0.05) -> float:
    """Runs as many requests as the limit allows while others wait. Returns the throughput of the last quarter."""
    dice = random.Random(7)
    now, running, ends = 0.0, 0, list[float]()
    times = []
    while len(times) < answers:
        while running < limit.value:
            running += 1
            heapq.heappush(ends, now + service(limit.value) * dice.uniform(1 - noise, 1 + noise))
        now = max(heapq.heappop(ends), now)
        running -= 1
        times.append(now)
        limit.ended(None, now, None, is_full=True)
    last = times[-answers // 4 :]
    return len(last) / (last[-1] - last[0])


def test_a_model_that_does_not_batch_keeps_a_short_queue() -> None:
    """One instance, 100 ms for each request, and a declared batch size that the model does not use."""
    limit = ThroughputLimit(1, 8)
    rate = under_load(limit, fifo(1, 0.1))
    assert limit.value <= 4
    assert rate == pytest.approx(10.0, rel=0.1)


def test_a_fast_model_gets_a_high_limit() -> None:
    """One request takes 0.2 ms: all 256 connections of a benchmark may run at once."""
    limit = ThroughputLimit(1, 1)
    under_load(limit, fifo(1, 0.0002), 60_000)
    assert limit.value >= 256


BATCHES = batching(1, 0.02, 0.001, 32)


@pytest.mark.parametrize(
    ("declared", "service", "answers", "least"),
    [
        (32, BATCHES, 20_000, 0.85 * 64 / BATCHES(64)),
        (16, lambda running: (running + 12) / 285, 4000, 0.9 * 285 * 64 / (64 + 12)),
        (1, lambda running: 0.5 * max(running / 40, 1.0), 12_000, 0.85 * 80),
    ],
    ids=[
        "batches are filled",
        "every step of a chain is busy: 157 answers per second with 16 requests, 240 with 64, as measured",
        "a model of one declared instance runs 40 requests at a time",
    ],
)
def test_a_limit_that_increases_throughput_is_found(
    declared: int, service: Service, answers: int, least: float
) -> None:
    assert under_load(ThroughputLimit(1, declared), service, answers) >= least


def test_the_limit_recovers_after_a_slow_phase() -> None:
    limit = ThroughputLimit(2, 4)
    before = under_load(limit, fifo(2, 0.01))
    under_load(limit, fifo(2, 3.0), 60)
    assert under_load(limit, fifo(2, 0.01)) >= 0.9 * before


def test_the_limit_is_unchanged_while_no_requests_wait() -> None:
    limit = ThroughputLimit(2, 8)
    for number in range(5000):
        limit.ended(None, number * 0.01, None, is_full=False)
    assert limit.value == 8


def test_a_full_queue_in_triton_lowers_the_limit() -> None:
    limit = ThroughputLimit(2, 64)
    limit.ended(None, 1.0, TooManyRequests("full"), is_full=False)
    assert limit.value < 64
    for _ in range(20):
        limit.ended(None, 1.0, TooManyRequests("full"), is_full=False)
    assert limit.value == 3


def test_the_limits_of_all_workers_add_up_to_the_capacity() -> None:
    parts = [ThroughputLimit(4, 16, processes=4).value for _ in range(4)]
    assert sum(parts) == 16


def test_a_limit_set_in_the_file_does_not_adapt() -> None:
    limit = Admission().of("p", "m", Capacity(instances=2, requests=8), 5).model_queue.limit
    assert type(limit) is Limit
    limit.ended(None, 1.0, TooManyRequests("full"), is_full=False)
    for number in range(1000):
        limit.ended(None, number * 0.001, None, is_full=True)
    assert limit.value == 5


DECOUPLED = Capacity(is_decoupled=True)
TIMEOUT_S = 300.0


@dataclass
class Places:
    """A model that runs a number of streams at a time, first in, first out, with the same interval for all of them.

    ``batch_s``: outputs arrive only at multiples of this time, as those of a busy engine.
    """

    places: int
    first_s: float = 0.05
    stream_s: float = 5.0
    interval_s: float = 0.25
    batch_s: float = 0.0
    running: int = 0
    """Streams that run, or wait for a place."""
    most: int = 0
    """The highest value of ``running``."""
    free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.places)

    async def run(self, slot: Slot) -> float:
        """Runs one stream. Returns the time of its first output."""
        self.running += 1
        self.most = max(self.most, self.running)
        async with self.free:
            time = asyncio.get_running_loop().time
            await self._arrive(time() + self.first_s)
            slot.output()
            first, ends = time(), time() + self.stream_s - self.first_s
            while time() + self.interval_s <= ends:
                await self._arrive(time() + self.interval_s)
                slot.output()
        self.running -= 1
        return first

    async def _arrive(self, due: float) -> None:
        if self.batch_s:
            due = ceil(due / self.batch_s) * self.batch_s
        await asyncio.sleep(due - asyncio.get_running_loop().time())


@dataclass
class Seen:
    """``arrival``, ``start``, ``first``: in seconds, of the request, its slot and its first output."""

    arrival: float
    start: float = 0.0
    first: float = 0.0
    refusals: list[int] = field(default_factory=list)

    @property
    def first_event_s(self) -> float:
        return self.first - self.arrival


def pipeline(workers: int = 1) -> PipelineAdmission:
    return Admission(Share(1, workers)).of("p", "m", DECOUPLED)


async def burst(
    pipelines: Sequence[PipelineAdmission], model: Places, clients: int, within_s: float = 1.3
) -> list[Seen]:
    """Each client asks for one stream, and again after a refusal's ``Retry-After``.

    The clients are distributed evenly to the pipelines.
    """
    time = asyncio.get_running_loop().time
    begin = time()
    seen = [Seen(begin + number * within_s / clients) for number in range(clients)]

    async def ask(each: Seen, at: PipelineAdmission) -> None:
        await asyncio.sleep(each.arrival - time())
        while True:
            try:
                slot = await at.claim_of(ANYONE).enter(Deadline.after(TIMEOUT_S))
                break
            except TooManyRequests as exc:
                each.refusals.append(exc.retry_after_s or 0)
                await asyncio.sleep(exc.retry_after_s or 0)
        each.start = time()
        each.first = await model.run(slot)
        slot.leave()

    await asyncio.gather(*(ask(each, pipelines[number % len(pipelines)]) for number, each in enumerate(seen)))
    return seen


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[max(int(len(ordered) * share + 0.5) - 1, 0)]


WAYS = {"one worker": [1], "two workers": [2, 2], "two gateways": [1, 1]}
"""For each process, the number of workers of its gateway."""
ways = pytest.mark.parametrize("way", WAYS)


def pipelines_of(way: str) -> list[PipelineAdmission]:
    return [pipeline(workers) for workers in WAYS[way]]


def seen_in(model: Places, clients: int, pipelines: Sequence[PipelineAdmission], within_s: float = 1.3) -> list[Seen]:
    return simulated(burst(pipelines, model, clients, within_s))


def late(seen: Sequence[Seen], after_s: float = 1.0) -> int:
    return sum(each.first - each.start > after_s for each in seen)


class TestAColdGateway:
    @ways
    @pytest.mark.parametrize("first_s", [0.02, 0.05, 0.2, 2.0])
    def test_a_burst_that_fits_into_the_model_runs_at_once(self, way: str, first_s: float) -> None:
        seen = seen_in(Places(256, first_s), 128, pipelines_of(way))
        assert not any(each.refusals for each in seen)
        assert percentile([each.first_event_s for each in seen], 0.99) <= first_s + 1

    @ways
    def test_of_a_thousand_clients_those_that_run_have_a_first_output_soon(self, way: str) -> None:
        model, pipelines = Places(256), pipelines_of(way)
        seen = seen_in(model, 1000, pipelines)
        assert late(seen) <= STREAMS * len(pipelines) * 1.5
        assert sorted(each.start - each.arrival for each in seen)[240] <= 1.5
        assert max(each.first_event_s for each in seen) <= 1000 / 256 * model.stream_s
        assert max(len(each.refusals) for each in seen) <= 8

    @ways
    @pytest.mark.parametrize("places", [4, 16, 64])
    def test_a_full_model_does_not_hold_many_streams(self, way: str, places: int) -> None:
        model, pipelines = Places(places), pipelines_of(way)
        seen = seen_in(model, 128, pipelines)
        assert not any(each.refusals for each in seen)
        assert model.most <= places + STREAMS * len(set(WAYS[way]) | set(WAYS[way][1:])) * len(pipelines)
        assert max(each.first_event_s for each in seen) <= 128 / places * model.stream_s
        assert sum(each.model_queue.limit.value for each in pipelines) <= places + 4

    def test_streams_of_a_minute_start_as_soon_as_short_ones(self) -> None:
        seen = seen_in(Places(256, stream_s=60.0, interval_s=5.0), 128, [pipeline()])
        assert percentile([each.first_event_s for each in seen], 0.99) <= 1

    def test_a_slow_first_output_of_a_small_model_corrects_the_limit(self) -> None:
        """Nothing distinguishes this model from a large one before the first outputs."""
        model, at = Places(4, first_s=2.0), pipeline()
        seen_in(model, 128, [at])
        assert model.most <= COLD_STREAMS
        assert at.model_queue.limit.value <= 8

    def test_outputs_in_bursts_do_not_stop_the_growth(self) -> None:
        """Measured with vLLM on two cores: gaps of 0.5 to 0.7 s for all streams."""
        seen = seen_in(Places(64, batch_s=0.7, stream_s=20.0, interval_s=0.1), 64, [pipeline()], within_s=0.1)
        assert max(each.first_event_s for each in seen) <= 3.0

    def test_calls_with_a_single_output_also_raise_the_limit(self) -> None:
        model, at = Places(64, first_s=0.5, stream_s=0.5), pipeline()
        seen_in(model, 2000, [at], within_s=20.0)
        assert at.model_queue.limit.value >= 50


class TestAGatewayInUse:
    def test_a_burst_after_single_streams_is_not_refused(self) -> None:
        """One stream at a time ran before, so the average duration is known and the limit is low."""
        at = pipeline()

        async def bursts() -> list[Seen]:
            for _ in range(5):
                await burst([at], Places(256), 1)
            return await burst([at], Places(256), 128)

        seen = simulated(bursts())
        assert not any(each.refusals for each in seen)
        assert percentile([each.first_event_s for each in seen], 0.99) <= 1

    def test_a_full_model_keeps_its_limit_under_constant_load(self) -> None:
        model, at = Places(16), pipeline()
        seen = seen_in(model, 400, [at], within_s=100.0)
        assert 16 <= at.model_queue.limit.value <= 20
        assert late(seen[100:]) <= 0.05 * len(seen)

    def test_the_limit_follows_a_model_with_fewer_places(self) -> None:
        at = pipeline()

        async def bursts() -> None:
            await burst([at], Places(64), 200)
            await burst([at], Places(8), 300, within_s=150.0)

        simulated(bursts())
        assert at.model_queue.limit.value <= 16

    def test_the_limit_follows_a_model_with_more_places(self) -> None:
        at = pipeline()

        async def bursts() -> list[Seen]:
            await burst([at], Places(8), 100)
            await asyncio.sleep(20.0)
            return await burst([at], Places(128), 128)

        seen = simulated(bursts())
        assert not any(each.refusals for each in seen)
        assert percentile([each.first_event_s for each in seen], 0.99) <= 2


Step = tuple[str, Sequence[int], float]
LATE: list[Step | int] = [("start", [8], 0.05), ("answer", [8], 2.0)]
STORIES: dict[str, list[Step | int]] = {
    "each first output makes room for another stream": [
        *(16, ("start", range(8, 16), 0.05)),
        *(("answer", range(8, 12), 0.1), 20),
    ],
    "a late first output stops the growth": [*LATE, 9],
    "the growth begins again after a pause with one stream": [*LATE, ("wait", [], 2.1), 9, ("wait", [], 3.0), 10],
    "a pause after growth is as short as the first one": [
        *(*LATE, ("wait", [], 3.0), ("start", [9], 3.0), ("answer", [9], 3.05), 12),
        *(("start", [10], 3.1), ("answer", [10], 5.0), ("wait", [], 5.9), 11, ("wait", [], 6.0), 12),
    ],
    "a stream that ends gives its place to one that waits in the model": [
        *(("start", range(8, 16), 0.05), ("end", [0], 5.0)),
        8,
    ],
    "a first output that others overtook is not late": [
        *(("start", [8], 0.05), ("start", [9], 1.0), ("answer", [9], 1.05)),
        *(17, ("answer", [8], 3.0), 18),
    ],
    "streams whose outputs slow down stop the growth": [
        *(("answer", range(8), 0.1), ("start", range(8, 16), 4.9), ("answer", range(8, 16), 5.0), 16),
        *(("answer", range(8), 5.0), ("start", [16], 5.0), ("answer", [16], 5.05), 17),
    ],
    "a late first output lowers a limit that does not grow": [*LATE, ("start", [9], 2.1), ("answer", [9], 8.0), 7],
    "a burst of late outputs lowers the limit once": [
        *LATE,
        *(("start", range(9, 20), 2.1), ("answer", range(9, 20), 8.0), 7),
    ],
    "a full queue in Triton lowers the limit": [("refuse", [99], 1.0), 6],
    "requests of an earlier configuration are ignored": [("answer", [99, 99], 1.0), ("end", [99], 1.0), 16],
}
"""What happens to streams, and the limit after it. Eight streams run, with a first output after 50 ms."""


class TestTheLimit:
    def do(self, limit: StreamLimit, *steps: Step | int) -> None:
        for step in steps:
            if isinstance(step, int):
                assert limit.value == step
                continue
            kind, streams, now = step
            if kind == "wait":
                limit.pass_time(now)
            for stream in streams:
                match kind:
                    case "start":
                        limit.started(stream, now)
                    case "answer":
                        limit.output(stream, now)
                    case _:
                        error = TooManyRequests("full") if kind == "refuse" else None
                        limit.ended(stream, now, error, is_full=False)

    @pytest.fixture
    def limit(self) -> StreamLimit:
        limit = StreamLimit(1, 1)
        self.do(limit, ("start", range(8), 0.0), ("answer", range(8), 0.05))
        return limit

    @pytest.mark.parametrize("story", STORIES)
    def test_the_limit_follows_first_outputs(self, limit: StreamLimit, story: str) -> None:
        self.do(limit, *STORIES[story])

    def test_the_growth_doubles_again_while_there_is_room(self, limit: StreamLimit) -> None:
        self.do(limit, *LATE)
        assert limit.pass_time(2.1) == pytest.approx(0.9)
        limit.pass_time(3.0)
        values, number = [], 9
        for round_ in range(4):
            more = range(number, limit.value)
            self.do(limit, ("start", more, 4.0 + round_), ("answer", range(number), 4.0 + round_))
            self.do(limit, ("answer", more, 4.05 + round_))
            number = more.stop
            values.append(limit.value - number)
        assert values == [2, 4, 8, 8]

    def test_the_limit_is_lower_for_each_of_several_workers(self) -> None:
        assert StreamLimit(1, 1, processes=4).value == STREAMS / 4


def test_a_new_configuration_replaces_the_limit_while_streams_run() -> None:
    async def replace() -> tuple[int, int]:
        admission = Admission()
        at = admission.of("p", "m", DECOUPLED)
        slot = at.claim_of(ANYONE).try_enter()
        assert slot is not None
        admission.of("p", "m", DECOUPLED, 3)
        slot.output()
        slot.leave()
        return at.model_queue.running, at.model_queue.limit.value

    assert asyncio.run(replace()) == (0, 3)
