"""Simulates clients of a decoupled model, with the real queue, on the simulated clock."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from app.admission.admission import Admission, PipelineAdmission
from app.admission.keys import ANYONE
from app.admission.scheduler import Slot
from app.core.errors import TooManyRequests
from app.core.inference import Deadline
from app.core.model import Capacity
from app.core.share import Share

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

    @property
    def in_model_s(self) -> float:
        return self.first - self.start


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
        with slot:
            each.start = time()
            each.first = await model.run(slot)

    await asyncio.gather(*(ask(each, pipelines[number % len(pipelines)]) for number, each in enumerate(seen)))
    return seen


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[max(int(len(ordered) * share + 0.5) - 1, 0)]
