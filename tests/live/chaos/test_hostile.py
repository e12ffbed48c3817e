"""After generated hostile requests of every dialect, no process has ended, and valid requests still work."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from app.core.errors import Outcome
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.hostile.dialects import hostile, valid
from tests.live.chaos.hostile.heads import Hostile
from tests.live.chaos.hostile.sender import Sender
from tests.live.chaos.hostile.values import CANARY
from tests.live.chaos.reply import Reply
from tests.live.chaos.report import HOSTILE, SEED, table, write_part
from tests.toolkit.processes import GatewayProcess

BATCH = 500
SENDERS = 16
WARM = 1000
"""The memory of the gateway is first measured after this number of requests."""
MAX_GROWTH_MIB = 48.0
MAX_ERROR_BYTES = 4096
NAMED = re.compile(rb"(?:unknown model: |inference (?:in|out)put |memory region: |parameter |request has )'[^']{0,64}'")
"""A name that an error under ``/v2`` may repeat."""


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
        self.answers: Counter[tuple[str, int]] = Counter()
        self.faults: dict[int, str] = {}

    async def batch(self, indices: Iterator[int]) -> None:
        async def client(sender: Sender) -> None:
            for index in indices:
                await self._send(sender, index)

        await asyncio.gather(*map(client, self._senders))

    async def _send(self, sender: Sender, index: int) -> None:
        request = hostile(self._seed, index)
        try:
            reply = await sender.send(request)
        except (TimeoutError, EOFError, OSError, ValueError) as exc:
            self.faults[index] = repr(exc)
            return
        self.answers[request.kind, 0 if reply is None else reply.status] += 1
        fault = None if reply is None else fault_of(request, reply)
        if fault is not None:
            self.faults[index] = fault

    async def canaries(self) -> list[tuple[str, int]]:
        """The valid requests that are not answered with 200."""
        sender = Sender(self._port)
        replies = [(each.path, await sender.send(Hostile(each.kind, each.content()))) for each in valid()]
        await sender.close()
        return [
            (path, 0 if reply is None else reply.status) for path, reply in replies if not reply or reply.status != 200
        ]

    async def close(self) -> None:
        for sender in self._senders:
            await sender.close()


async def test_an_answer_is_that_of_its_request(gateway: GatewayProcess) -> None:
    sender = Sender(int(gateway.url.rpartition(":")[2]))
    live, listed = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in ("/health/live", "/v1/pipelines")
    )
    await sender.send(Hostile("two requests", live + live, is_exact=False))
    reply = await sender.send(Hostile("one request", listed))
    await sender.close()
    assert reply is not None
    assert "pipelines" in reply.text


@pytest.mark.parametrize(
    "count", [1500, pytest.param(HOSTILE, id="long", marks=[pytest.mark.full, pytest.mark.timeout(HOSTILE / 50 + 120)])]
)
async def test_hostile_requests_harm_nothing(gateway: GatewayProcess, triton: EmbeddedTriton, count: int) -> None:
    """``hostile(SEED, index)`` is the request of an index that failed."""
    process, alive = psutil.Process(gateway.process.pid), processes_of(triton)
    attack, rss, began = Attack(gateway, SEED), Counter[int](), time.monotonic()
    internal = gateway.metric("requests_total", outcome=Outcome.INTERNAL)
    assert await attack.canaries() == []
    for start in range(0, count, BATCH):
        await attack.batch(iter(range(start, min(start + BATCH, count))))
        assert attack.faults == {}
        assert await attack.canaries() == []
        assert processes_of(triton) == alive
        rss[start + BATCH] = process.memory_info().rss
    await attack.close()
    assert gateway.metric("requests_total", outcome=Outcome.INTERNAL) == internal
    assert (rss[count] - rss[WARM]) / 2**20 < MAX_GROWTH_MIB
    if count == HOSTILE:
        write_hostile(attack.answers, rss, time.monotonic() - began)


def write_hostile(answers: Counter[tuple[str, int]], rss: Counter[int], took_s: float) -> None:
    kinds = sorted({kind for kind, _ in answers})
    statuses = sorted({status for _, status in answers})
    rows = [[kind, *(f"{answers[kind, status]:,}" for status in statuses)] for kind in kinds]
    growth = (max(rss.values()) - rss[WARM]) / 2**20
    result = "no process ended; no answer was a 500, larger than 4 KiB or an echo; valid requests got 200"
    write_part(
        "2-hostile",
        [("Hostile requests", f"{answers.total():,}", result, f"at most +{growth:.1f}")],
        f"## {answers.total():,} hostile requests\n\n"
        f"Seed {SEED}, {SENDERS} connections, {took_s:.0f} s. After every {BATCH} requests Triton and its models had "
        "their process ids, and one valid request of each kind got 200. No answer was a 500, larger than 4 KiB "
        f"or an echo. The gateway's memory grew by at most {growth:.1f} MiB after the first {WARM:,}. "
        "Status 0: the client left, or sent a message without an end.\n\n" + table(["", *map(str, statuses)], rows),
    )
