"""Decides whether a request to a model runs at once, waits in the queue, or is refused.

A request enters the queue of its model (``ModelQueue``) with a ``Claim``, which names the quotas to charge
(``Quota``). It gets a ``Slot`` for the time that it runs, or the queue raises TooManyRequests.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf
from time import monotonic

from app.admission.keys import ANYONE, NO_OWN_LIMITS, Key
from app.admission.limit import WEIGHT, Limit, StreamLimit, average
from app.admission.queue import FairQueue
from app.core.errors import DeadlineExceeded, TooManyRequests
from app.core.inference import Deadline


class Slot:
    """The slot of one running request, until :meth:`leave`."""

    __slots__ = ("_has_output", "_is_left", "_limit", "_model_queue", "_quotas", "_stream_limit", "since")

    def __init__(self, model_queue: "ModelQueue", quotas: "tuple[Quota, ...]") -> None:
        self._model_queue, self._quotas, self.since = model_queue, quotas, monotonic()
        self._has_output = self._is_left = False
        self._limit = limit = model_queue.limit
        """A later configuration of the model has another limit, which does not know this request."""
        self._stream_limit = limit if isinstance(limit, StreamLimit) else None
        model_queue.running += 1
        model_queue.first_start = min(model_queue.first_start, self.since)
        for quota in quotas:
            quota.running += 1
        if self._stream_limit is not None:
            self._stream_limit.started(self, self.since)

    def output(self) -> None:
        """Call this when a response of a decoupled model arrives."""
        now = monotonic()
        if self._stream_limit is not None:
            self._stream_limit.output(self, now)
        if not self._has_output:
            self._has_output, model_queue = True, self._model_queue
            model_queue.output_s = average(model_queue.output_s, now - self.since)
            model_queue.serve_queue()

    def answered(self) -> None:
        """Call this after each call to the model, if the slot is kept for several calls."""
        now = monotonic()
        self._model_queue.learn(self, self._limit, now, None)
        self.since, self._has_output = now, False
        if self._stream_limit is not None:
            self._stream_limit.started(self, now)

    def leave(self, error: BaseException | None = None) -> None:
        """Releases the slot, once. ``error``: the error of the request, if it failed."""
        if self._is_left:
            return
        self._is_left = True
        model_queue, quotas = self._model_queue, self._quotas
        model_queue.running -= 1
        for quota in quotas:
            quota.running -= 1
        if model_queue.running == 0:
            model_queue.first_start = inf
        model_queue.learn(self, self._limit, monotonic(), error)
        for quota in quotas:
            for each in tuple(quota.model_queues):
                each.serve_queue()


UNLIMITED = sys.maxsize


@dataclass(eq=False, slots=True)
class Quota:
    """Counts running and waiting requests against their limits.

    The limits are per pipeline, per caller, or per caller and pipeline. ``of_key``: not of a pipeline.
    """

    of_key: bool = False
    max_running: int = UNLIMITED
    max_waiting: int = UNLIMITED
    running: int = 0
    waiting: int = 0
    model_queues: "set[ModelQueue]" = field(default_factory=set)
    """The queues in which requests of this quota wait."""

    def set_limits(self, max_running: int | None, max_waiting: int | None) -> None:
        """Sets both limits; None means no limit."""
        self.max_running = UNLIMITED if max_running is None else max_running
        self.max_waiting = UNLIMITED if max_waiting is None else max_waiting

    @property
    def is_limited(self) -> bool:
        """Whether requests may have to wait because of this quota's limit."""
        return self.max_running != UNLIMITED


LONGEST_WAIT_S = 3.0
"""Longest expected wait: this, or the time of two requests if that is longer. Otherwise the request is refused."""
MARGIN = 1.5
"""Safety factor for the estimated wait."""
LONGEST_RETRY_S = 30
CALLERS_PER_SLOT = 2
"""The number of refused callers that get the same retry time. Some callers never retry; no slot stays free for them."""
MOST_PROMISES = 1024
TICK_S = 0.01
"""Shortest time between two updates of a limit that grows with time."""


@dataclass(eq=False, slots=True)
class Claim:
    """A caller that requests slots of a model: the quotas to charge, and its place in the order of the queue."""

    model_queue: "ModelQueue"
    quotas: tuple[Quota, ...]
    """The first is the pipeline's."""
    key: str = ""
    priority: int = 0

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free. The queue need not be checked: ``serve_queue`` gives free slots away at once."""
        if self.model_queue.running >= self.model_queue.limit.value:
            return False
        for quota in self.quotas:  # noqa: SIM110 - a third of the time of all()
            if quota.running >= quota.max_running:
                return False
        return True

    def check(self, deadline: Deadline) -> None:
        """Raises TooManyRequests if :meth:`enter` would raise it now. Has no effect on other requests.

        Call it before you read the body.
        """
        if not self.has_slot:
            self.model_queue.place_of(self, deadline)

    def admits(self, deadline: Deadline) -> bool:
        """Whether :meth:`check` would raise nothing now. Unlike a refusal, it reserves no retry time."""
        try:
            if not self.has_slot:
                self.model_queue.place_of(self, deadline, reserves=False)
        except TooManyRequests:
            return False
        return True

    def try_enter(self) -> Slot | None:
        """Returns a slot if one is free and no other request waits for it. The caller must release it."""
        return Slot(self.model_queue, self.quotas) if self.has_slot else None

    async def enter(self, deadline: Deadline) -> Slot:
        """Returns a slot, waiting in the queue if necessary. The caller must release it.

        Raises:
            TooManyRequests: If the request may not wait, or waited too long to meet its deadline.
            DeadlineExceeded: If the deadline passes during the wait.
        """
        if not self.has_slot and (displaced := self.model_queue.place_of(self, deadline)) is not None:
            self.model_queue.refuse(displaced, "Requests with a greater right to the queue came.")
        return await self.enter_again(deadline)

    async def enter_again(self, deadline: Deadline) -> Slot:
        """Returns a further slot of a request that had one. It waits for its turn, however long the queue is.

        Raises TooManyRequests or DeadlineExceeded if its turn comes too late.
        """
        return self.try_enter() or await self.model_queue.wait(Waiter(self, deadline))


class Waiter:
    """One request in the queue."""

    __slots__ = ("claim", "deadline", "key", "priority", "slot")

    def __init__(self, claim: Claim, deadline: Deadline) -> None:
        self.claim = claim
        self.key = claim.key
        self.priority = claim.priority
        self.deadline = deadline
        self.slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()


class ModelQueue:
    """Grants the slots of one model, and queues requests while all slots are taken."""

    def __init__(self, model: str, limit: Limit) -> None:
        self.model = model
        self.limit = limit
        self.running = 0
        self.of_steps = Claim(self, (Quota(),), priority=sys.maxsize)
        """The claim of steps of requests that already run: they go before all requests that do not."""
        self._queue = FairQueue[Waiter]()
        self._service_s = 0.0
        """Moving average of the time of a request in Triton; 0 before the first request has ended."""
        self.first_start = inf
        """The start of the first request since no request ran."""
        self._queued_at = -inf
        """Since when requests wait without a break."""
        self._next_growth: asyncio.TimerHandle | None = None
        self.output_s: float | None = None
        """Moving average of the time to the first output of a decoupled model."""
        self._promised: dict[str, float] = {}
        """By key: when the caller that was refused last may expect a slot."""

    @property
    def has_waiters(self) -> bool:
        return self._queue.size > 0

    def serve_queue(self) -> None:
        """Gives free slots to waiting requests."""
        self._give_slots()
        if self._queue.size and self._next_growth is None:
            self._pass_time()

    def _pass_time(self) -> None:
        """Lets the limit grow while requests wait, even if nothing else happens."""
        self._next_growth = None
        if self._queue.size:
            wait_s = self.limit.pass_time(monotonic())
            if wait_s is not None:
                self._next_growth = asyncio.get_running_loop().call_later(max(wait_s, TICK_S), self._pass_time)
            self._give_slots()

    def _give_slots(self) -> None:
        while self._queue.size and self.running < self.limit.value:
            waiter = self._queue.take(lambda each: each.claim.has_slot)
            if waiter is None:
                return
            self._stop_waiting(waiter)
            if waiter.slot.done():
                continue  # the request was cancelled in this turn of the event loop
            if waiter.deadline.remaining_s() < self._needed_s:
                self.refuse(waiter, "The request waited too long to be answered before its deadline.")
            else:
                waiter.slot.set_result(Slot(self, waiter.claim.quotas))

    async def wait(self, waiter: Waiter) -> Slot:
        if not self._queue.size:
            self._queued_at = monotonic()
        self._queue.add(waiter)
        for quota in waiter.claim.quotas:
            quota.waiting += 1
            quota.model_queues.add(self)

        self.serve_queue()
        try:
            async with asyncio.timeout(waiter.deadline.remaining_s()):
                return await waiter.slot
        except (TimeoutError, asyncio.CancelledError) as exc:
            slot = waiter.slot
            if not self._drop(waiter) and slot.done() and not slot.cancelled() and slot.exception() is None:
                slot.result().leave(asyncio.CancelledError())  # granted in the same turn of the event loop
            if isinstance(exc, asyncio.CancelledError):
                raise
            raise DeadlineExceeded("The deadline passed while the request waited for its turn.") from exc

    def refuse(self, waiter: Waiter, detail: str) -> None:
        """Ends the wait of a request with TooManyRequests."""
        self._drop(waiter)
        if not waiter.slot.done():
            waiter.slot.set_exception(TooManyRequests(detail, retry_after_s=self._retry_after_s(waiter.key)))

    def _drop(self, waiter: Waiter) -> bool:
        """Removes a request from the queue. Returns whether it was still waiting."""
        was_waiting = self._queue.remove(waiter)
        if was_waiting:
            self._stop_waiting(waiter)
        return was_waiting

    def _stop_waiting(self, waiter: Waiter) -> None:
        for quota in waiter.claim.quotas:
            quota.waiting -= 1
            if quota.waiting == 0:
                quota.model_queues.clear()

    def place_of(self, claim: Claim, deadline: Deadline, *, reserves: bool = True) -> Waiter | None:
        """Returns the request of the same pipeline that must leave its full queue for a new request, if any.

        Raises TooManyRequests if the new request may not wait. ``reserves``: whether that reserves a retry time.
        """
        own, displaced = claim.quotas[0], None
        if own.waiting >= own.max_waiting:
            is_of_pipeline = lambda waiter: waiter.claim.quotas[0] is own  # noqa: E731
            displaced = self._queue.displaced_by(claim.priority, claim.key, is_of_pipeline)

        def refusal(detail: str, wait_s: float = 0.0, quota: Quota | None = None) -> TooManyRequests:
            """``wait_s``: how long it remains so. ``quota``: of the API key, if its own limit is the reason."""
            seconds = self._retry_after_s(claim.key, wait_s, quota) if reserves else None
            return TooManyRequests(detail, retry_after_s=seconds)

        full = [each for each in claim.quotas if each.waiting >= each.max_waiting]
        if full and (displaced is None or full != [own]):
            key = next((each for each in full if each.of_key), None)
            if key is None:
                raise refusal("The queue of this pipeline is full.")
            detail = "This API key has reached its own limit of requests that run or wait at the same time."
            if not key.is_limited:
                raise refusal(detail)
            turn_s = self._expected_s / key.max_running  # its requests that wait already get their slots first
            raise refusal(detail, (key.waiting + 1) * turn_s - turn_s / CALLERS_PER_SLOT, key)
        wait_s, quota = self._wait_of(claim, displaced)
        because = "" if quota is None else " because of the limit of its API key"
        over_s = wait_s * MARGIN + self._needed_s - deadline.remaining_s()
        if over_s > 0:
            raise refusal(f"The request cannot be answered before its deadline{because}.", over_s, quota)
        allowed_s = max(LONGEST_WAIT_S, 2 * self._service_s)
        if wait_s > allowed_s:
            raise refusal(f"Too many requests wait for this model{because}.", wait_s - allowed_s, quota)
        return displaced

    @property
    def _needed_s(self) -> float:
        """Expected time from the start of a request to its answer or its first output."""
        return self._service_s if self.output_s is None else self.output_s

    @property
    def _expected_s(self) -> float:
        """Expected time of a request in Triton; 0 if unknown.

        If no request has ended yet, the requests are expected to take twice as long as they have taken so far.
        """
        return self._service_s or max(2 * (monotonic() - self.first_start), 0.0)

    def _rate_of(self, slots: int) -> float:
        """Requests that end per second while all of these slots are taken, by Little's law; 0 if unknown."""
        return slots / self._expected_s if self._expected_s else 0.0

    @property
    def _is_rising(self) -> bool:
        now = monotonic()
        waits_since = self._queued_at if self._queue.size else now
        return now - max(self.limit.rose_at, waits_since) < self.limit.rising_s

    def _wait_of(self, claim: Claim, displaced: Waiter | None) -> tuple[float, Quota | None]:
        """Expected wait of a new request that takes the place of ``displaced``, in seconds.

        Also returns the key's quota if its limit is the reason, and not the model.
        """
        if not self._service_s:
            return 0.0, None
        ahead = 0 if self._is_rising else self._queue.ahead_of(claim.priority, claim.key) + 1
        wait_s, reason = ahead / self._rate_of(self.limit.value), None
        for quota in claim.quotas:
            if quota.is_limited:
                place = quota.waiting + (displaced is None or quota not in displaced.claim.quotas)
                if (own_wait_s := place * self._service_s / quota.max_running) > wait_s:
                    wait_s, reason = own_wait_s, quota if quota.of_key else None
        return wait_s, reason

    def _retry_after_s(self, key: str, wait_s: float = 0.0, quota: Quota | None = None) -> int:
        """Returns the whole seconds until a slot is expected to be free for a caller that is refused now.

        Each refusal of a key reserves a later time, so that refused callers do not all retry at once. While the limit
        rises, the time is not known. ``quota``: of the key, if its own limit is the reason.
        """
        now = monotonic()
        if quota is not None:
            rate = CALLERS_PER_SLOT * self._rate_of(quota.max_running)
        else:
            rate = CALLERS_PER_SLOT * self._rate_of(self.limit.value) / max(self._queue.callers(), 1)
        if not rate or (quota is None and self._is_rising):
            return 1
        if len(self._promised) >= MOST_PROMISES:
            self._promised = {each: due for each, due in self._promised.items() if due > now}
        due = max(self._promised.get(key, 0.0), now + wait_s) + 1 / rate
        due = self._promised[key] = min(due, now + LONGEST_RETRY_S)
        return max(ceil(due - now), 1)

    def learn(self, slot: Slot, limit: Limit, now: float, error: BaseException | None) -> None:
        """Updates the averages and the limit. The only failures that count are a passed deadline and a full queue."""
        duration_s = now - slot.since
        if error is None:
            self._service_s += (WEIGHT if self._service_s else 1.0) * (duration_s - self._service_s)
        elif isinstance(error, DeadlineExceeded):
            self._service_s += WEIGHT * max(duration_s - self._service_s, 0.0)
        limit.ended(slot, now, error, is_full=self._queue.size > 0)
        if isinstance(error, TooManyRequests):
            error.retry_after_s = self._retry_after_s("")
        if self._queue.size:
            self.serve_queue()


QUEUE = 256
"""Default limit on the requests that wait for a pipeline at the same time."""


class PipelineAdmission:
    """Admits the requests of one pipeline, or of a model called by its own name, to the queue of the model."""

    def __init__(
        self, name: str, model_queue: ModelQueue, share: Callable[[int | None], int | None], callers: dict[str, Quota]
    ) -> None:
        """``share``: of this process in a limit. ``callers``: the quotas of callers with limits of their own, by id."""
        self.name = name
        self.model_queue = model_queue
        self.own = Quota()
        self.per_key: int | None = None
        self._share, self._callers = share, callers
        self._by_key: dict[str, Quota] = {}
        self._claims: dict[str, tuple[Key, Claim]] = {}
        self._anyone = Claim(model_queue, (self.own,))
        self.set_limits()

    def set_limits(self, in_flight: int | None = None, queue: int | None = None, per_key: int | None = None) -> None:
        """``in_flight`` and ``queue``: of all callers. ``per_key``: the requests of one key that run."""
        self.per_key, share = per_key, self._share
        self.own.set_limits(share(in_flight), share(QUEUE if queue is None else queue))
        self._claims.clear()
        for quota in self._by_key.values():
            quota.set_limits(share(per_key), None)
        self.model_queue.serve_queue()

    def claim_of(self, caller: Key) -> Claim:
        """Returns the same object until a limit changes."""
        if caller is ANYONE and self.per_key is None:
            return self._anyone
        known = self._claims.get(caller.id)
        if known is None or known[0] is not caller:
            quotas = [self.own]
            if caller.limits != NO_OWN_LIMITS:
                of_caller = self._callers.setdefault(caller.id, Quota(of_key=True))
                of_caller.set_limits(self._share(caller.limits.in_flight), self._share(caller.limits.queue))
                quotas.append(of_caller)
            if self.per_key is not None:
                of_key = self._by_key.setdefault(caller.id, Quota(of_key=True))
                of_key.set_limits(self._share(self.per_key), None)
                quotas.append(of_key)
            claim = Claim(self.model_queue, tuple(quotas), caller.id, caller.priority)
            known = self._claims[caller.id] = caller, claim
        return known[1]
