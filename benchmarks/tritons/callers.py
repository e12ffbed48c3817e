"""Closed-loop callers that record the end and the status of each request."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

BODY = b'{"X":1.5}'
RETRY_S = 0.05
"""The pause of a caller after a failure."""


@dataclass(frozen=True)
class Ended:
    at: float
    """Seconds on ``time.monotonic``."""
    pipeline: str
    status: int
    """0 if the connection broke."""


@dataclass
class Callers:
    url: str
    ended: list[Ended] = field(default_factory=list)

    @asynccontextmanager
    async def running(self, by_pipeline: dict[str, int]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._call(name)) for name, count in by_pipeline.items() for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def between(self, start: float, end: float) -> Iterator[Ended]:
        return (each for each in self.ended if start <= each.at < end)

    def rate(self, start: float, end: float) -> float:
        """Returns the successes per second."""
        return sum(each.status == 200 for each in self.between(start, end)) / (end - start)

    async def _call(self, pipeline: str) -> None:
        head = f"POST /v1/pipelines/{pipeline} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY
        address = urlsplit(self.url)
        while True:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                while True:
                    writer.write(request)
                    status = await _status_of(reader)
                    self.ended.append(Ended(time.monotonic(), pipeline, status))
                    if status != 200:
                        await asyncio.sleep(RETRY_S)
            except (OSError, asyncio.IncompleteReadError):
                self.ended.append(Ended(time.monotonic(), pipeline, 0))
                await asyncio.sleep(RETRY_S)
            finally:
                writer.transport.abort()


async def _status_of(reader: asyncio.StreamReader) -> int:
    """Reads one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return int(head[9:12])
