"""Runs the parts of one request beside each other. Each part takes a slot of the model, as a request does."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from app.admission.admission import PipelineAdmission
from app.admission.keys import Caller
from app.admission.scheduler import Slot
from app.core.batch import Batch, BatchPart
from app.core.errors import GatewayError
from app.core.inference import Deadline

SMALLEST_SHARE = 2
"""Parts that may always run at the same time: the model computes one while the gateway sends the next."""

Work = Callable[[Slot, BatchPart], Awaitable[None]]


@dataclass(slots=True)
class _Lane:
    """Runs parts one after the other. ``slot``: that of its current part."""

    slot: Slot

    def ended(self, task: asyncio.Task[None]) -> None:
        self.slot.leave(asyncio.CancelledError() if task.cancelled() else task.exception())


class PartRunner:
    """Runs the parts of one request, at most half of the model's slots at the same time.

    The first part waits for a slot. Others start while slots are free and no other request waits. If requests wait when
    a part ends, its slot goes to them, and the next part waits for its turn.
    """

    def __init__(
        self, admission: PipelineAdmission, caller: Caller, deadline: Deadline, batch: Batch, work: Work
    ) -> None:
        """``work``: runs one part in its slot."""
        self._admission = admission
        self._caller = caller
        self._deadline = deadline
        self._parts: Iterator[BatchPart] = batch.parts()
        self._waiting = self._count = len(batch)
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
        return max(self._admission.model_queue.limit.value // 2, SMALLEST_SHARE)

    def _start(self, slot: Slot) -> None:
        self._lanes += 1
        lane = _Lane(slot)
        self._group.create_task(self._run(lane, self._take())).add_done_callback(lane.ended)

    def _take(self) -> BatchPart:
        self._waiting -= 1
        return next(self._parts)

    async def _run(self, lane: _Lane, part: BatchPart) -> None:
        while True:
            try:
                await self._work(lane.slot, part)
            except GatewayError as exc:
                if self._count > 1:
                    part.fail(exc)
                raise
            if not self._waiting:
                self._lanes -= 1
                return
            part = self._take()
            if lane.slot.is_awaited:
                lane.slot.leave()
                lane.slot = await self._admission.enter_again(self._caller, self._deadline)
            else:
                lane.slot.answered()
                self._start_more()
