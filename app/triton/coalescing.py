"""Sends small requests that wait for the same model as one call, and gives each caller its own rows.

Group commit: a request goes at once if fewer calls of its model are under way than :data:`Calls` allows and nobody
waits. Otherwise it waits until a call ends, and goes together with the requests like it that wait then. There is no
timer, so no request waits for others to come.

No caller gets the rows of another. Requests share a call only if everything about them is equal but their rows
(``key_of``). A response is cut only if each output has exactly the rows of its requests (``cut``), and only if a trial
has shown for the version that answered that rows do not depend on each other. Otherwise nobody is answered from the
call: each request is sent again, alone.

Decision 10 has the reasons.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from typing import Any, Protocol

from app.core.coalescing import Coalescing, CoalescingFault
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
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.rows import RowsMismatch, bytes_of, check_rows, cut, joined, key_of, owned, rows_of
from app.triton.errors import is_dead_process

Calls = Callable[[str, int], int]
"""The model and the number of steps of a request -> how many calls of the model may be under way."""
SPLITS = 3
SPLIT_WINDOW_S = 10.0
PAUSE_S = 10.0
"""After this many failed calls within the window, the requests of a model share no calls for a while."""

_log = logging.getLogger(__name__)


class CoalescingObserver(Protocol):
    def called(self, model: str, items: int, requests: int) -> None:
        """A call for requests with ``coalescing``. ``items``: their rows."""

    def repeated(self, model: str) -> None:
        """A part of a failed call is sent again, or a request of a call that could not be cut."""


class _Waiting:
    """A request that waits for its turn, and then for the call that it shares."""

    __slots__ = ("answer", "call", "deadline", "request", "rows", "size")

    def __init__(self, request: InferenceRequest, deadline: Deadline, rows: int, size: int) -> None:
        self.request = request
        self.deadline = deadline
        self.rows = rows
        self.size = size
        self.call: _Call | None = None
        self.answer: asyncio.Future[InferenceResponse | None] = asyncio.get_running_loop().create_future()
        """None: the request must be sent alone."""

    def give(self, response: InferenceResponse | None) -> None:
        if not self.answer.done():
            self.answer.set_result(response)
            self._call_of_answer().present -= 1

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self._call_of_answer().present -= 1

    def expire(self) -> None:
        if not self.answer.done():
            text = f"Model '{self.request.model}' did not answer before the deadline."
            self.answer.set_exception(DeadlineExceeded(text))
            self.leave()

    def leave(self) -> None:
        """The caller does not wait any more; its rows are dropped. The last one to leave cancels the call."""
        if self.call is not None:
            self.call.left()

    def _call_of_answer(self) -> "_Call":
        assert self.call is not None
        return self.call


class _Call:
    """A call, or the calls that follow if it fails, for several requests. ``task`` makes the calls."""

    def __init__(self, members: list[_Waiting]) -> None:
        self.members = members
        self.task: asyncio.Task[None] | None = None
        self.present = len(members)
        """How many members still wait for their answer."""
        for each in members:
            each.call = self

    def left(self) -> None:
        self.present -= 1
        if self.present == 0 and self.task is not None:
            self.task.cancel()


class _Model:
    """The calls of one model that are under way, and the requests that wait, by their keys."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting: dict[Hashable, deque[_Waiting]] = {}
        self.paused_until = 0.0
        self.ended: set[str] = set()
        """The versions whose responses could not be cut."""
        self._splits: deque[float] = deque(maxlen=SPLITS)

    def take(self) -> list[_Waiting]:
        """Takes requests that may share a call, those of the key that waits longest. Empty if they have all left."""
        key, waiting = next(iter(self.waiting.items()))
        taken, items, size = list[_Waiting](), 0, 0
        while waiting:
            first = waiting[0]
            if not first.answer.done():
                coalescing = _coalescing_of(first.request)
                items, size = items + first.rows, size + first.size
                if taken and (items > coalescing.max_items or size > coalescing.max_bytes):
                    break
                taken.append(first)
            waiting.popleft()
        del self.waiting[key]
        if waiting:
            self.waiting[key] = waiting  # behind the other keys
        return taken

    def note_split(self, now: float) -> bool:
        """Notes that a call failed and is split. Returns whether that begins a pause."""
        self._splits.append(now)
        if len(self._splits) < SPLITS or now - self._splits[0] > SPLIT_WINDOW_S:
            return False
        self._splits.clear()
        self.paused_until = now + PAUSE_S
        return True


class CoalescingEngine(Engine):
    """An engine over an engine. Only requests with ``coalescing`` may share calls; all others pass unchanged."""

    def __init__(self, engine: Engine, calls: Calls, observer: CoalescingObserver) -> None:
        self._engine = engine
        self._calls = calls
        self._observer = observer
        self._models = defaultdict[str, _Model](_Model)

    def infer(self, request: InferenceRequest, deadline: Deadline) -> Coroutine[Any, Any, InferenceResponse]:
        coalescing = request.coalescing
        if coalescing is None:
            return self._engine.infer(request, deadline)
        return self._coalesced(request, coalescing, deadline)

    async def _coalesced(
        self, request: InferenceRequest, coalescing: Coalescing, deadline: Deadline
    ) -> InferenceResponse:
        model, rows = self._models[request.model], rows_of(request)
        if not model.running or (model.running < self._limit(request) and not model.waiting):
            self._observer.called(request.model, rows or 1, 1)
            model.running += 1
            try:
                response = await self._engine.infer(request, deadline)
                self._check(model, request, coalescing, response, rows)
                return response
            finally:
                self._ended(model)
        size = bytes_of(request)
        fits = rows is not None and rows <= coalescing.max_items and 2 * size <= coalescing.max_bytes
        if rows is None or not fits or not self._may_share(model, coalescing):
            return await self._alone(model, request, deadline)
        shared = await self._in_group(model, _Waiting(owned(request), deadline, rows, size))
        if shared is None:
            self._observer.repeated(request.model)
            if request.shared is not None:
                request.shared.clear()
            return await self._alone(model, request, deadline)
        return shared

    def _may_share(self, model: _Model, coalescing: Coalescing) -> bool:
        if not coalescing.is_on or not coalescing.proven.isdisjoint(model.ended):
            return False
        return not model.paused_until or asyncio.get_running_loop().time() >= model.paused_until

    def _limit(self, request: InferenceRequest) -> int:
        return self._calls(request.model, _coalescing_of(request).steps)

    async def _alone(self, model: _Model, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        rows = rows_of(request)
        self._observer.called(request.model, rows or 1, 1)
        response = await self._engine.infer(request, deadline)
        self._check(model, request, _coalescing_of(request), response, rows)
        return response

    def _check(
        self,
        model: _Model,
        request: InferenceRequest,
        coalescing: Coalescing,
        response: InferenceResponse,
        rows: int | None,
    ) -> None:
        """Looks at the answer of a call for one request. Its caller gets it also if it ends the shared calls."""
        if response.version not in coalescing.proven:
            coalescing.saw(response.version)
        elif rows is not None:
            try:
                check_rows(response, request, rows, coalescing.outputs)
            except RowsMismatch as exc:
                self._end(model, request, response.version, exc.fault)

    async def _in_group(self, model: _Model, waiting: _Waiting) -> InferenceResponse | None:
        """Waits for the answer of a shared call; None if the request must be sent alone."""
        model.waiting.setdefault(key_of(waiting.request), deque()).append(waiting)
        self._start_calls(model)
        expiry = asyncio.get_running_loop().call_later(waiting.deadline.remaining_s(), waiting.expire)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if waiting.answer.cancelled():
                waiting.leave()
            else:
                waiting.answer.exception()  # answered in the same turn of the event loop
            raise
        finally:
            expiry.cancel()

    def _ended(self, model: _Model) -> None:
        model.running -= 1
        self._start_calls(model)

    def _start_calls(self, model: _Model) -> None:
        while model.waiting:
            first = next(iter(model.waiting.values()))[0]
            if model.running >= self._limit(first.request):
                return
            if taken := model.take():
                model.running += 1
                call = _Call(taken)
                call.task = asyncio.create_task(self._run(model, call))
                call.task.add_done_callback(lambda _: self._ended(model))

    async def _run(self, model: _Model, call: _Call) -> None:
        """Answers every member of a call; an exception that is not expected fails all of them."""
        try:
            await self._answer(model, call.members)
        except asyncio.CancelledError:
            for each in call.members:
                each.answer.cancel()
            raise
        except Exception as exc:
            for each in call.members:
                each.fail(exc)

    async def _answer(self, model: _Model, members: list[_Waiting]) -> None:
        """Makes one call, and after a failure of the model further calls by halves, within a budget of calls."""
        parts, budget, failure = [members], budget_of(len(members)), None
        while parts:
            part = [each for each in parts.pop() if not each.answer.done()]
            if not part:
                continue
            if not budget and failure is not None:
                _fail(failure, part)
                continue
            if len(part) > 1 and not self._may_share(model, _coalescing_of(part[0].request)):
                _send_alone(part)
                continue
            budget -= 1
            try:
                answered = await self._called(model, part)
            except GatewayError as exc:
                if len(part) == 1:
                    part[0].fail(exc)
                elif not is_of_model(exc):
                    _fail(exc, part, *parts)
                    return
                else:
                    if failure is None:
                        self._note_split(model, part[0].request.model)
                    failure, middle = exc, len(part) // 2
                    parts += [part[middle:], part[:middle]]
                    self._observer.repeated(part[0].request.model)
                    self._observer.repeated(part[0].request.model)
            else:
                if not answered:
                    _send_alone(part, *parts)
                    return

    async def _called(self, model: _Model, part: list[_Waiting]) -> bool:
        """Answers the requests of a part by one call. Returns False if nobody may be answered from it.

        Raises GatewayError.
        """
        first, deadline = part[0].request, Deadline(max(each.deadline.expires_at for each in part))
        if len(part) == 1:
            if first.shared is not None:
                first.shared.clear()
            part[0].give(await self._alone(model, first, deadline))
            return True
        rows, coalescing = [each.rows for each in part], _coalescing_of(first)
        self._observer.called(first.model, sum(rows), len(part))
        request = joined([each.request for each in part])
        for each in part:
            if each.request.shared is not None:
                each.request.shared.set(len(part), request.request_id, request.trace)
        response = await self._engine.infer(request, deadline)
        coalescing.saw(response.version)
        if response.version not in coalescing.proven or response.version in model.ended:
            return False
        try:
            responses = cut(response, request, rows, coalescing.outputs)
        except RowsMismatch as exc:
            self._end(model, first, response.version, exc.fault)
            return False
        for each, own in zip(part, responses, strict=True):
            each.give(own)
        return True

    def _end(self, model: _Model, request: InferenceRequest, version: str, fault: CoalescingFault) -> None:
        """No requests to this version of the model share a call any more."""
        _coalescing_of(request).end(version, fault)
        if version not in model.ended:
            model.ended.add(version)
            text = "requests to version %s of model '%s' do not share calls any more: %s"
            _log.error(text, version, request.model, fault)

    def _note_split(self, model: _Model, name: str) -> None:
        if model.note_split(asyncio.get_running_loop().time()):
            text = "requests to model '%s' do not share calls for %.0f s: the model fails too often"
            _log.warning(text, name, PAUSE_S)

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        return self._engine.infer_stream(request, deadline)


def budget_of(requests: int) -> int:
    """The most calls for this number of requests: enough to find two that fail, each alone."""
    return 4 * requests.bit_length() + 1


def is_of_model(error: GatewayError) -> bool:
    """Whether a part of the requests may succeed: the model failed, and its process did not die.

    A full queue, an unreachable Triton, a deadline, a cancellation and a dead process concern every request.
    """
    if isinstance(error, UpstreamProtocol) or is_dead_process(error):
        return False
    is_cancelled = error.upstream is not None and error.upstream.grpc_code == "CANCELLED"
    return isinstance(error, ModelError | ContractViolation | PayloadTooLarge) and not is_cancelled


def _fail(error: GatewayError, *parts: list[_Waiting]) -> None:
    """Answers requests that shared a call with its error. Logs the model's message, which no caller gets."""
    if error.upstream is not None and not _is_of_triton(error):
        text = "a call for several requests of model '%s' failed: %s"
        _log.warning(text, parts[0][0].request.model, error.upstream.message[:1024])
    for part in parts:
        for each in part:
            each.fail(for_one_of_several(error))


def _is_of_triton(error: GatewayError) -> bool:
    """Whether Triton itself, or the connection to it, wrote the error's message."""
    if isinstance(error, Unavailable):
        return not error.was_answered
    return isinstance(error, Rejected | DeadlineExceeded)


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


def _send_alone(*parts: list[_Waiting]) -> None:
    for part in parts:
        for each in part:
            each.give(None)


def _coalescing_of(request: InferenceRequest) -> Coalescing:
    assert request.coalescing is not None
    return request.coalescing
