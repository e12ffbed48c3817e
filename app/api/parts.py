"""Runs the parts of one request beside each other. Each part takes a slot of the model, as a request does."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from app.admission.admission import PipelineAdmission
from app.admission.keys import Caller
from app.admission.scheduler import Slot
from app.core.batch import Batch, BatchPart, PartEnd
from app.core.errors import DeadlineExceeded, GatewayError
from app.core.inference import Deadline, InferenceRequest, InferenceResponse

SMALLEST_SHARE = 2
"""Parts that may always run at the same time: the model computes one while the gateway sends the next."""

Work = Callable[[Slot, BatchPart], Awaitable[None]]


@dataclass(slots=True)
class _Lane:
    """Runs parts one after the other. ``slot``: that of its current part; None while it waits for its turn."""

    slot: Slot | None

    def ended(self, task: asyncio.Task[None]) -> None:
        if self.slot is not None:
            self.slot.leave(asyncio.CancelledError() if task.cancelled() else task.exception())


class PartRunner:
    """Runs the parts of one request: in all slots of the model while no other request needs one, otherwise in half.

    The first part waits for a slot. Others start while slots are free and no other request waits. If requests wait when
    a part ends, its slot goes to them, and the next part waits for its turn. A slot above the share becomes free.
    """

    def __init__(
        self, admission: PipelineAdmission, caller: Caller, deadline: Deadline, batch: Batch, work: Work
    ) -> None:
        """``work``: runs one part in its slot."""
        self._admission = admission
        self._caller = caller
        self._deadline = deadline
        self._batch = batch
        self._parts = batch.parts()
        self._waiting = len(batch)
        self._work = work
        self._lanes = 0
        self._group = asyncio.TaskGroup()

    async def run(self, first: Slot) -> None:
        """Returns after the last part, and leaves all slots. ``first``: the slot of the first part.

        Raises the first error of a part, after the other parts were cancelled. It names the items of the part.
        """
        try:
            async with self._group:
                self._start(first)
                self._start_more()
        except BaseExceptionGroup as exc:
            raise exc.exceptions[0] from None

    def _start_more(self) -> None:
        while self._waiting and self._lanes < self._share:
            slot = self._admission.try_enter(self._caller)
            if slot is None:
                return
            self._start(slot)

    @property
    def _share(self) -> int:
        """How many parts may run now."""
        queue = self._admission.model_queue
        is_alone = queue.running <= self._lanes and not queue.has_waiters
        return max(queue.limit.value if is_alone else queue.limit.value // 2, SMALLEST_SHARE)

    def _start(self, slot: Slot) -> None:
        self._lanes += 1
        lane = _Lane(slot)
        self._group.create_task(self._run(lane, self._take())).add_done_callback(lane.ended)

    def _take(self) -> BatchPart:
        self._waiting -= 1
        return next(self._parts)

    async def _run(self, lane: _Lane, part: BatchPart) -> None:
        while True:
            if lane.slot is None:
                lane.slot = await self._admission.enter_again(self._caller, self._deadline)
            await self._run_part(lane.slot, part)
            if not self._waiting or self._lanes > self._share:
                self._lanes -= 1
                return
            part = self._take()
            if lane.slot.is_awaited:
                lane.slot.leave()
                lane.slot = None
            else:
                lane.slot.answered()
                self._start_more()

    async def _run_part(self, slot: Slot, part: BatchPart) -> None:
        try:
            await self._work(slot, part)
        except GatewayError as exc:
            if self._batch.has_several:
                part.fail(exc)
            raise


_READ_AHEAD = 8
"""Responses of all parts that may wait for the reader of the stream."""


class PartStreams:
    """The streams of the parts of one request, as one."""

    def __init__(
        self,
        responses_of: Callable[[InferenceRequest], AsyncGenerator[InferenceResponse]],
        abandon: Callable[[InferenceRequest], None],
    ) -> None:
        """``responses_of``: calls the model. ``abandon``: makes it stop a request that nobody reads any more."""
        self._responses_of = responses_of
        self._abandon = abandon
        self._arrived = asyncio.Queue[InferenceResponse | Exception | None](_READ_AHEAD)

    async def read(self, slot: Slot, part: BatchPart) -> None:
        """Reads one part to its end, or to its error, which its last response has."""
        first, error = part.items.start, None
        try:
            async with aclosing(self._responses_of(part.request)) as responses:
                async for response in responses:
                    slot.output()
                    await self._arrived.put(replace(response, choice=first, is_final=False))
        except asyncio.CancelledError:
            self._abandon(part.request)
            raise
        except GatewayError as exc:
            if isinstance(exc, DeadlineExceeded):
                self._abandon(part.request)
            error = exc
        await self._arrived.put(PartEnd({}, choice=first, error=error))

    async def responses(self, runner: PartRunner, first: Slot) -> AsyncGenerator[InferenceResponse]:
        """Yields the responses of all parts as they arrive; ``choice`` is the number of a part's first item.

        The last response of each part is a :class:`PartEnd`. ``runner``: runs :meth:`read` for each part.
        """
        running = asyncio.create_task(self._run(runner, first))
        try:
            while (item := await self._arrived.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self, runner: PartRunner, first: Slot) -> None:
        try:
            await runner.run(first)
        except Exception as exc:
            await self._arrived.put(exc)
        else:
            await self._arrived.put(None)
