"""`python -m benchmarks bursts`: many streams of a continuous batcher start together, on a gateway without history.

The model has a fixed number of places and sends a token each 50 ms, whatever the load. Each client starts one stream of
five seconds. A refused client sends its request again after `Retry-After` seconds.
"""

import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.load.orders import HttpAsk, UnexpectedAnswer, request_of
from benchmarks.peers.contents import json_of
from benchmarks.stage import Gateway, Triton, running_gateway, running_triton
from benchmarks.table import Table
from benchmarks.timing import percentile

WITHIN_S = 1.3
STREAM_S = 5.0
STEP_S = 0.05
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_WAITED_MS = re.compile(rb'"waited_ms":"(\d+)"')


@dataclass(frozen=True)
class Case:
    clients: int
    places: int
    first_s: float = STEP_S
    gateways: int = 1
    workers: int = 1

    @property
    def name(self) -> str:
        ways = f"{self.gateways} gateways" if self.gateways > 1 else f"{self.workers} workers" * (self.workers > 1)
        return ", ".join(filter(None, [f"{self.clients} clients", f"{self.places} places", ways, self._first]))

    @property
    def _first(self) -> str:
        return f"first output after {self.first_s:g} s" if self.first_s != STEP_S else ""

    @property
    def ask(self) -> HttpAsk:
        steps = round((STREAM_S - self.first_s) / STEP_S) + 1
        body = json_of(places=self.places, first_ms=round(1000 * self.first_s), steps=steps)
        return HttpAsk("/v1/pipelines/bench_places/stream", body)


CASES = (
    Case(128, 256),
    Case(128, 256, workers=2),
    Case(128, 256, gateways=2),
    Case(128, 256, first_s=2.0),
    Case(128, 64),
    Case(128, 16),
    Case(64, 4),
    Case(1000, 256),
    Case(1000, 256, workers=2),
    Case(1000, 256, gateways=2),
)


@dataclass
class Client:
    """One stream."""

    first_s: float = 0.0
    """From the first request to the first event."""
    admitted_s: float = 0.0
    """From the request that was admitted to the first event."""
    in_model_s: float = 0.0
    """How long the model kept the stream waiting for a place."""
    retries: list[int] = field(default_factory=list)


async def run(rounds: int) -> list[Table]:
    """``rounds``: the number of cases to run, in order."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        async with running_triton(Path(folder)) as triton:
            for number, case in enumerate(CASES[:rounds]):
                rows.append(await _measured(case, triton, Path(folder) / str(number)))
    columns = (
        "case",
        "refused clients",
        "refusals",
        "first `Retry-After` s",
        "first event p50 s",
        "p99 s",
        "of an admitted request p50 s",
        "p99 s",
        "wait in the model p99 s",
        "max s",
        "limit at 3 s",
        "all ended s",
    )
    return [Table("Streams that start together on a new gateway", columns, rows, __doc__ or "")]


async def _measured(case: Case, triton: Triton, folder: Path) -> list[str]:
    async with AsyncExitStack() as stack:
        gateways = [await _gateway(stack, case, triton, folder / str(number)) for number in range(case.gateways)]
        begin = time.perf_counter()
        limit = asyncio.create_task(_limits_after(gateways, 3.0))
        clients = await asyncio.gather(*(_client(case, gateways, begin, number) for number in range(case.clients)))
        return _row(case, clients, await limit, time.perf_counter() - begin)


async def _gateway(stack: AsyncExitStack, case: Case, triton: Triton, folder: Path) -> Gateway:
    await asyncio.to_thread(folder.mkdir, parents=True)
    return await stack.enter_async_context(running_gateway(folder, triton, workers=case.workers))


async def _limits_after(gateways: Sequence[Gateway], seconds: float) -> float:
    """Returns the sum of the limits of all gateways."""
    await asyncio.sleep(seconds)
    pages = [(await each.client.get(f"{each.admin_url}/metrics")).text for each in gateways]
    found = re.findall(r'in_flight_limit{model="bench_places"} ([\d.]+)', "\n".join(pages))
    return sum(map(float, found))


async def _client(case: Case, gateways: Sequence[Gateway], begin: float, number: int) -> Client:
    since = begin + number * WITHIN_S / case.clients
    await asyncio.sleep(since - time.perf_counter())
    client = Client()
    while True:
        asked = time.perf_counter()
        answer = await _stream(gateways[number % len(gateways)].url, case.ask)
        if not isinstance(answer, int):
            client.first_s, client.admitted_s, client.in_model_s = answer.at - since, answer.at - asked, answer.waited_s
            return client
        client.retries.append(answer)
        await asyncio.sleep(answer)


class _First(NamedTuple):
    """The first event. ``waited_s``: as the model says."""

    at: float
    waited_s: float


async def _stream(url: str, ask: HttpAsk) -> _First | int:
    """Reads one stream to its end. Returns the seconds of ``Retry-After`` if it is refused."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request_of(ask))
        head = await reader.readuntil(b"\r\n\r\n")
        if head[9:12] == b"429":
            retry = _RETRY_AFTER.search(head)
            return int(retry[1]) if retry else 1
        if head[9:12] != b"200":
            raise UnexpectedAnswer((head + await reader.read(1000)).decode())
        tail = b""
        while not (waited_ms := _WAITED_MS.search(tail)):
            tail += await reader.readuntil(b"\n\n")
        first = _First(time.perf_counter(), int(waited_ms[1]) / 1000)
        while not tail.endswith(b"0\r\n\r\n"):
            tail = tail[-8:] + await reader.read(1 << 16)
        return first
    finally:
        writer.transport.abort()


def _row(case: Case, clients: Sequence[Client], limit: float, ended_s: float) -> list[str]:
    retries = [each.retries[0] for each in clients if each.retries]
    first, admitted = [each.first_s for each in clients], [each.admitted_s for each in clients]
    in_model = [each.in_model_s for each in clients]
    return [
        case.name,
        str(len(retries)),
        str(sum(len(each.retries) for each in clients)),
        f"{percentile(retries, 50):.0f}" if retries else "",
        *(f"{percentile(found, share):.2f}" for found in (first, admitted) for share in (50, 99)),
        f"{percentile(in_model, 99):.2f}",
        f"{max(in_model):.2f}",
        f"{limit:.0f}",
        f"{ended_s:.1f}",
    ]
