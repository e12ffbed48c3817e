"""After generated hostile requests of every dialect, no process has ended, and valid requests still work."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from app.core.errors import Outcome
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.client import Reply
from tests.live.chaos.hostile_requests import CANARY, Hostile, hostile, valid
from tests.live.chaos.report import HOSTILE, SEED, write_part
from tests.toolkit.processes import GatewayProcess

BATCH = 500
SENDERS = 16
WARM = 1000
"""The memory of the gateway is first measured after this number of requests."""
MAX_GROWTH_MIB = 48.0
MAX_ERROR_BYTES = 4096
NAMED = re.compile(rb"(?:unknown model: |inference (?:in|out)put |memory region: |parameter |request has )'[^']{0,64}'")
"""A name that an error under ``/v2`` may repeat."""

ANSWER_S = 20.0
FRAMING_S = 0.3
"""For an answer to a message without a defined end: the gateway may wait for more of it."""


class Sender:
    """Sends requests over a persistent connection, and parses the answers strictly."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: Hostile) -> Reply | None:
        """Returns None without a complete answer. Raises EOFError or OSError if the connection ended in an answer."""
        if not request.is_exact:
            self.close()
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
            reader, writer = self._streams
            writer.write(request.content)
            if request.leaves:
                await writer.drain()
                self.close()
                return None
            async with asyncio.timeout(ANSWER_S if request.is_exact else FRAMING_S):
                reply = await self._answer(reader, is_head=request.content.startswith(b"HEAD "))
        except (TimeoutError, EOFError, OSError):
            self.close()
            if request.is_exact:
                raise
            return None
        if not request.is_exact or reply.headers.get("connection") == "close":
            self.close()  # after a request that is not exact, a second answer may follow
        return reply

    async def _answer(self, reader: asyncio.StreamReader, *, is_head: bool) -> Reply:
        received = await reader.readuntil(b"\r\n\r\n")
        while received.startswith(b"HTTP/1.1 100 "):
            received = await reader.readuntil(b"\r\n\r\n")
        while (reply := Reply.of(received)) is not None and not (reply.is_whole or is_head):
            size = reply.headers.get("content-length")
            received += await (reader.readuntil(b"\r\n") if size is None else reader.readexactly(int(size)))
        assert reply is not None
        return reply

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def processes_of(triton: EmbeddedTriton) -> list[tuple[int, float]]:
    """Triton and the processes of its models, by process id and time of start."""
    assert triton.pid is not None
    server = psutil.Process(triton.pid)
    return sorted((each.pid, each.create_time()) for each in [server, *server.children(recursive=True)])


def fault_of(request: Hostile, reply: Reply) -> str | None:
    """Returns the faults of an answer to a hostile request."""
    if reply.status < 400:
        return None
    if reply.status == 500:
        return "500"
    if reply.status == 503:
        return "503: a model is gone"
    if len(reply.body) > MAX_ERROR_BYTES:
        return f"an error of {len(reply.body)} bytes"
    if CANARY.encode() in NAMED.sub(b"", reply.body).lower():
        return "an echo of the request"
    return None


class Attack:
    """``faults``: the indices of requests with a wrong answer -> the fault."""

    def __init__(self, gateway: GatewayProcess, seed: int) -> None:
        self._seed = seed
        self._port = int(gateway.url.rpartition(":")[2])
        self._senders = [Sender(self._port) for _ in range(SENDERS)]
        self.statuses: Counter[int] = Counter()
        self.faults: dict[int, str] = {}

    async def batch(self, indices: Iterator[int]) -> None:
        async def client(sender: Sender) -> None:
            for index in indices:
                request = hostile(self._seed, index)
                try:
                    reply = await sender.send(request)
                except (TimeoutError, EOFError, OSError, ValueError) as exc:
                    self.faults[index] = repr(exc)
                    continue
                self.statuses[0 if reply is None else reply.status] += 1
                fault = None if reply is None else fault_of(request, reply)
                if fault is not None:
                    self.faults[index] = fault

        await asyncio.gather(*map(client, self._senders))

    async def canaries(self) -> list[tuple[str, int]]:
        """The valid requests that are not answered with 200."""
        sender = Sender(self._port)
        replies = [(each.path, await sender.send(Hostile(each.kind, each.content()))) for each in valid()]
        sender.close()
        statuses = [(path, 0 if reply is None else reply.status) for path, reply in replies]
        return [(path, status) for path, status in statuses if status != 200]

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


@pytest.mark.parametrize(
    "count", [1500, pytest.param(HOSTILE, id="long", marks=[pytest.mark.full, pytest.mark.timeout(HOSTILE / 50 + 120)])]
)
async def test_hostile_requests_harm_nothing(gateway: GatewayProcess, triton: EmbeddedTriton, count: int) -> None:
    """``hostile(SEED, index)`` is the request of an index that failed."""
    process, alive = psutil.Process(gateway.process.pid), processes_of(triton)
    attack, rss = Attack(gateway, SEED), Counter[int]()
    internal = gateway.metric("requests_total", outcome=Outcome.INTERNAL)
    assert await attack.canaries() == []
    for start in range(0, count, BATCH):
        await attack.batch(iter(range(start, min(start + BATCH, count))))
        assert attack.faults == {}
        assert await attack.canaries() == []
        assert processes_of(triton) == alive
        rss[start + BATCH] = process.memory_info().rss
    attack.close()
    assert gateway.metric("requests_total", outcome=Outcome.INTERNAL) == internal
    assert (rss[count] - rss[WARM]) / 2**20 < MAX_GROWTH_MIB
    if count == HOSTILE:
        counts = ", ".join(f"{status}: {times:,}" for status, times in sorted(attack.statuses.items()))
        result = "no process ended; no answer was a 500, larger than 4 KiB or an echo; valid requests got 200"
        growth = (max(rss.values()) - rss[WARM]) / 2**20
        result += f"; statuses {counts} (0: the client left)"
        write_part("2-hostile", ("Hostile requests", f"{count:,}", result, f"at most +{growth:.1f}"))
