"""A worker's question to the supervisor for the statistics of all workers."""

import asyncio

from app.observability.statistics import Statistics
from app.process.workers.channel import Channel, StatisticsWanted, Totals


class TotalsOfWorkers:
    """At most one question is on its way; callers that ask meanwhile get the same answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answer: asyncio.Future[Statistics] | None = None

    async def statistics(self) -> Statistics:
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._channel.send(StatisticsWanted())
        return await asyncio.shield(self._answer)

    def arrived(self, totals: Totals) -> None:
        if self._answer is not None:
            self._answer.set_result(totals.statistics)
            self._answer = None
