"""Sends small requests that wait for the same model as one call, and gives each caller its own rows.

Group commit: a request goes at once if fewer calls of its model are under way than :data:`Calls` allows and no
request waits. Otherwise it waits until a call ends, and goes together with the requests like it that wait then. There
is no timer, so no request waits for others to come.

No caller gets the rows of another. Requests share a call only if everything about them is equal but their rows
(``key_of``). A response is cut only if each output has exactly the rows of its requests (``cut``), and only if a trial
has shown for the version that answered that rows do not depend on each other. Otherwise the
response is discarded, and each request is sent again, alone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

from prometheus_client import Counter, Histogram

from app.coalescing.rows import (
    Coalescing,
    Joinable,
    RowsMismatch,
    bytes_of,
    check_rows,
    cut,
    joined,
    key_of,
    rows_of,
)
from app.core.engine import Engine
from app.core.errors import (
    ContractViolation,
    DeadlineExceeded,
    GatewayError,
    ModelError,
    PayloadTooLarge,
    Rejected,
    Unavailable,
    UpstreamProtocol,
)
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, SentAs

Calls = Callable[[str, int], int]
"""The model and the number of steps of a request -> how many calls of the model may be under way."""
BUDGET = 4
"""A failed call is made again at most this many times for each halving of its requests."""
SPLITS = 3
SPLIT_WINDOW_S = 10.0
PAUSE_S = 10.0
"""After this many failed calls within the window, the requests of a model share no calls for a while."""

_log = logging.getLogger(__name__)


class SharedCallMetrics:
    """Counts the calls of models whose requests may share calls."""

    def __init__(self, counter: Callable[..., Counter], histogram: Callable[..., Histogram]) -> None:
        text, bounds = "Items of the calls of models whose requests share calls", (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self._items_of = cache(histogram("items_per_call", text, "model", buckets=bounds).labels)
        self._shared_of = cache(counter("coalesced_requests", "Requests that shared a call", "model").labels)
        text = "Calls that were made again for a part of a shared call"
        self._repeats_of = cache(counter("coalesced_repeats", text, "model").labels)

    def called(self, model: str, items: int, requests: int) -> None:
        self._items_of(model).observe(items)
        if requests > 1:
            self._shared_of(model).inc(requests)

    def repeated(self, model: str, calls: int = 1) -> None:
        """A part of a failed call is sent again, or a request of a call that could not be cut."""
        self._repeats_of(model).inc(calls)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for its turn, and then for the call that it shares, whose ``task`` answers ``members``.

    ``answer``: None if the request must be sent alone.
    """

    request: InferenceRequest
    joinable: Joinable
    deadline: Deadline
    rows: int
    size: int
    answer: "asyncio.Future[InferenceResponse | None]"
    members: "Sequence[_Waiting]" = ()
    task: asyncio.Task[None] | None = None

    def give(self, response: InferenceResponse | None) -> None:
        if not self.answer.done():
            self.answer.set_result(response)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class CoalescingEngine(Engine):
    """An engine around an engine. Only requests that are :class:`Joinable` may share calls; all others pass unchanged.

    ``is_dead_process``: whether an error means that the process of a model died.
    """

    def __init__(
        self, engine: Engine, calls: Calls, metrics: SharedCallMetrics, is_dead_process: Callable[[GatewayError], bool]
    ) -> None:
        self.engine = engine
        self.calls = calls
        self.metrics = metrics
        self.is_dead_process = is_dead_process
        self.of_model = cache(partial(_Model, self))

    def infer(self, request: InferenceRequest, deadline: Deadline) -> Coroutine[Any, Any, InferenceResponse]:
        for each in request.extensions:
            if isinstance(each, Joinable):
                return self.of_model(request.model).infer(request, each, deadline)
        return self.engine.infer(request, deadline)

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        return self.engine.infer_stream(request, deadline)


class _Model:
    """The calls of one model that are under way, and the requests that wait, by their keys."""

    def __init__(self, shared: CoalescingEngine, name: str) -> None:
        self._shared = shared
        self._name = name
        self.running = 0
        self.waiting: dict[Hashable, deque[_Waiting]] = {}
        self._ended: set[str] = set()
        """The versions whose responses could not be cut."""
        self._splits: deque[float] = deque(maxlen=SPLITS)
        self._paused_until = 0.0

    async def infer(self, request: InferenceRequest, joinable: Joinable, deadline: Deadline) -> InferenceResponse:
        coalescing, rows = joinable.coalescing, rows_of(request)
        if not self.running or (self.running < self._shared.calls(self._name, coalescing.steps) and not self.waiting):
            self.running += 1
            try:
                return await self._alone(request, joinable, rows, deadline)
            finally:
                self._call_ended()
        size = bytes_of(request)
        fits = rows is not None and rows <= coalescing.max_items and 2 * size <= coalescing.max_bytes
        if rows is None or not fits or not self._may_share(coalescing):
            return await self._alone(request, joinable, rows, deadline)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request.owned(), joinable, deadline, rows, size, loop.create_future())
        self.waiting.setdefault((coalescing, key_of(request)), deque()).append(waiting)
        self._start_calls()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                response = await waiting.answer
        except (TimeoutError, asyncio.CancelledError) as exc:
            if not waiting.answer.cancelled():
                waiting.answer.exception()  # answered in the same turn of the event loop
            elif waiting.task is not None and all(each.answer.done() for each in waiting.members):
                waiting.task.cancel()  # no caller waits for the call any more
            if isinstance(exc, asyncio.CancelledError):
                raise
            raise DeadlineExceeded(f"Model '{self._name}' did not answer before the deadline.") from exc
        if response is None:
            self._shared.metrics.repeated(self._name)
            return await self._alone(request, joinable, rows, deadline)
        return response

    def _may_share(self, coalescing: Coalescing) -> bool:
        if not coalescing.is_on or not coalescing.proven.isdisjoint(self._ended):
            return False
        return not self._paused_until or asyncio.get_running_loop().time() >= self._paused_until

    async def _alone(
        self, request: InferenceRequest, joinable: Joinable, rows: int | None, deadline: Deadline
    ) -> InferenceResponse:
        """Looks at the answer of a call for one request. Its caller gets it also if it ends the shared calls."""
        joinable.sent_as = None
        self._shared.metrics.called(self._name, rows or 1, 1)
        response, coalescing = await self._shared.engine.infer(request, deadline), joinable.coalescing
        if response.version not in coalescing.proven:
            coalescing.saw(response.version)
        elif rows is not None:
            try:
                check_rows(response, request, rows, coalescing.outputs)
            except RowsMismatch as exc:
                self._end(coalescing, response.version, exc)
        return response

    def _call_ended(self, members: Sequence[_Waiting] = (), task: asyncio.Task[None] | None = None) -> None:
        """A call that was cancelled, or has an unexpected exception, ends for all of its members."""
        self.running -= 1
        if task is not None and task.cancelled():
            for each in members:
                each.answer.cancel()
        elif task is not None and (error := task.exception()) is not None:
            for each in members:
                each.fail(error)
        self._start_calls()

    def _start_calls(self) -> None:
        while self.waiting:
            first = next(iter(self.waiting.values()))[0]
            if self.running >= self._shared.calls(self._name, first.joinable.coalescing.steps):
                return
            if members := self._taken():
                self.running += 1
                task = asyncio.create_task(self._answer(members))
                task.add_done_callback(partial(self._call_ended, members))
                for each in members:
                    each.members, each.task = members, task

    def _taken(self) -> list[_Waiting]:
        """Takes requests that may share a call, those of the key that waits longest. Empty if they have all left."""
        key, waiting = next(iter(self.waiting.items()))
        taken, items, size = list[_Waiting](), 0, 0
        while waiting:
            first = waiting[0]
            if not first.answer.done():
                coalescing = first.joinable.coalescing
                items, size = items + first.rows, size + first.size
                if taken and (items > coalescing.max_items or size > coalescing.max_bytes):
                    break
                taken.append(first)
            waiting.popleft()
        del self.waiting[key]
        if waiting:
            self.waiting[key] = waiting  # behind the other keys
        return taken

    async def _answer(self, members: list[_Waiting]) -> None:
        """Makes one call, and after a failure of the model further calls by halves, within a budget of calls."""
        # enough calls to find two requests that fail, each alone
        parts, budget, failure = [members], BUDGET * len(members).bit_length() + 1, None
        while parts:
            part = [each for each in parts.pop() if not each.answer.done()]
            if not part:
                continue
            if not budget and failure is not None:
                self._fail(failure, part)
                continue
            if len(part) > 1 and not self._may_share(part[0].joinable.coalescing):
                for each in part:
                    each.give(None)
                continue
            budget -= 1
            try:
                answered = await self._called(part)
            except GatewayError as exc:
                # The model failed, and its process did not die: a part of the requests may succeed. A full queue, an
                # unreachable Triton, a deadline, a cancellation and a dead process concern every request.
                is_of_model = isinstance(exc, ModelError | ContractViolation | PayloadTooLarge)
                is_of_all = isinstance(exc, UpstreamProtocol) or self._shared.is_dead_process(exc)
                is_cancelled = exc.upstream is not None and exc.upstream.grpc_code == "CANCELLED"
                if not is_of_model or is_of_all or is_cancelled:
                    self._fail(exc, chain(part, *parts))
                    return
                if failure is None:  # after several, no requests share calls for a while
                    now = asyncio.get_running_loop().time()
                    self._splits.append(now)
                    if len(self._splits) == SPLITS and now - self._splits[0] <= SPLIT_WINDOW_S:
                        self._splits.clear()
                        self._paused_until = now + PAUSE_S
                        text = "requests to model '%s' do not share calls for %.0f s: the model fails too often"
                        _log.warning(text, self._name, PAUSE_S)
                failure, middle = exc, len(part) // 2
                parts += [part[middle:], part[:middle]]
                self._shared.metrics.repeated(self._name, 2)
            else:
                if not answered:
                    for each in chain(part, *parts):
                        each.give(None)
                    return

    async def _called(self, part: list[_Waiting]) -> bool:
        """Answers the requests of a part with one call. Returns False if its response must not be used.

        Raises the error of a call for several requests.
        """
        first, deadline = part[0], Deadline(max(each.deadline.expires_at for each in part))
        if len(part) == 1:
            try:
                first.give(await self._alone(first.request, first.joinable, first.rows, deadline))
            except GatewayError as exc:
                first.fail(exc)
            return True
        rows, coalescing = [each.rows for each in part], first.joinable.coalescing
        self._shared.metrics.called(self._name, sum(rows), len(part))
        request = joined([each.request for each in part])
        sent_as = SentAs(request.request_id, request.trace, {"shared_with": len(part) - 1})
        for each in part:
            each.joinable.sent_as = sent_as
        response = await self._shared.engine.infer(request, deadline)
        coalescing.saw(response.version)
        if response.version not in coalescing.proven or response.version in self._ended:
            return False
        try:
            responses = cut(response, request, rows, coalescing.outputs)
        except RowsMismatch as exc:
            self._end(coalescing, response.version, exc)
            return False
        for each, own in zip(part, responses, strict=True):
            each.give(own)
        return True

    def _end(self, coalescing: Coalescing, version: str, mismatch: RowsMismatch) -> None:
        """Requests to this version of the model no longer share calls."""
        coalescing.refuse(version, mismatch)
        if version not in self._ended:
            self._ended.add(version)
            text = "requests to version %s of model '%s' do not share calls any more: %s"
            _log.error(text, version, self._name, mismatch)

    def _fail(self, error: GatewayError, members: Iterable[_Waiting]) -> None:
        """Answers requests that shared a call with its error. Logs the model's message, which no caller gets."""
        if error.upstream is not None and not _is_of_triton(error):
            text = "a call for several requests of model '%s' failed: %s"
            _log.warning(text, self._name, error.upstream.message[:1024])
        for each in members:
            each.fail(for_one_of_several(error))


def for_one_of_several(error: GatewayError) -> GatewayError:
    """Returns a copy for one of the requests that shared a call.

    Each needs its own, because a pipeline completes its error. The model's message is removed: it may have a text of
    another caller.
    """
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    if not _is_of_triton(error):
        copy.upstream = copy.fault = None
    return copy


def _is_of_triton(error: GatewayError) -> bool:
    """Whether Triton itself, or the connection to it, wrote the error's message."""
    if isinstance(error, Unavailable):
        return not error.was_answered
    return isinstance(error, Rejected | DeadlineExceeded)
