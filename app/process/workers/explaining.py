"""Explained requests of a worker. The supervisor keeps those of all workers, and receives Triton's spans."""

import asyncio
from itertools import count

from app.domain.errors import Internal
from app.observability.explain.request import ExplainedRequest, Found
from app.process.workers.channel import Channel, Explanation, ExplanationWanted

ANSWER_S = 5.0


class SupervisorsExplanations:
    """Implements :class:`app.observability.explain.request.Explanations`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Found | None]] = {}

    def put(self, request: ExplainedRequest) -> None:
        """Never waits."""
        self._channel.send(request)

    async def find(self, owner: str, request_id: str) -> Found | None:
        """Asks the supervisor. Raises Internal if it does not answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._channel.send(ExplanationWanted(number, owner, request_id))
        try:
            async with asyncio.timeout(ANSWER_S):
                found: Found | None = await answer
        except TimeoutError as exc:
            raise Internal("The supervisor of this gateway's workers does not answer.") from exc
        finally:
            del self._waiting[number]
        return found

    def arrived(self, answer: Explanation) -> None:
        """No-op if nobody waits for the answer any more."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.found)
