"""Runs the parts of one request beside each other. Each part takes a slot of the model, as a request does."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.admission.scheduler import Claim, Slot
from app.core.batch import Batch, BatchPart
from app.core.errors import GatewayError
from app.core.inference import Deadline

SMALLEST_SHARE = 2
"""Parts that may always run at the same time: the model computes one while the gateway sends the next."""

READ_AHEAD = 8
"""Responses of all parts that may wait for their reader."""
Work = Callable[[Slot, BatchPart], Awaitable[GatewayError | None]]
"""Runs one part in its slot. Returns its error."""


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

    def __init__(self, claim: Claim, deadline: Deadline, batch: Batch, work: Work) -> None:
        self._claim = claim
        self._deadline = deadline
        self._parts = batch.parts()
        self._waiting = len(batch)
        self._work = work
        self._lanes = 0
        self._group = asyncio.TaskGroup()

    async def run(self, first: Slot) -> None:
        """Returns after the last part, and leaves all slots. ``first``: the slot of the first part.

        Raises TooManyRequests or DeadlineExceeded, in a group, if the turn of a part comes too late.
        """
        async with self._group:
            self._start(first)
            self._start_more()

    def _start_more(self) -> None:
        while self._waiting and self._lanes < self._share:
            slot = self._claim.try_enter()
            if slot is None:
                return
            self._start(slot)

    @property
    def _share(self) -> int:
        """How many parts may run now."""
        queue = self._claim.model_queue
        is_alone = queue.running <= self._lanes and not queue.has_waiters
        return max(queue.limit.value if is_alone else queue.limit.value // 2, SMALLEST_SHARE)

    def _start(self, slot: Slot) -> None:
        self._lanes += 1
        lane = _Lane(slot)
        self._waiting -= 1
        self._group.create_task(self._run(lane, next(self._parts))).add_done_callback(lane.ended)

    async def _run(self, lane: _Lane, part: BatchPart) -> None:
        while True:
            if lane.slot is None:
                lane.slot = await self._claim.enter_again(self._deadline)
            slot, error = lane.slot, await self._work(lane.slot, part)
            is_last = not self._waiting or self._lanes > self._share
            if is_last or error is not None or self._claim.model_queue.has_waiters:
                slot.leave(error)
                lane.slot = None
            if is_last:
                self._lanes -= 1
                return
            self._waiting -= 1
            part = next(self._parts)
            if lane.slot is not None:
                slot.answered()
                self._start_more()
