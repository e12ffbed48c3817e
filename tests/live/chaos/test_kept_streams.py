"""Clients that start streams at the full rate and never read them leave the memory within GATEWAY_MAX_KEPT_BYTES."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.report import KEPT_S, table, write_part
from tests.toolkit.connections import Connection
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.redis import RedisServer

MIB = 2**20
CLIENTS = 8
RESUME_S = 30
LATER_S = 40.0
"""Longer than RESUME_S, so that every stream has expired."""
OVERHEAD = 1.25
"""The allocator's part of the memory of kept events."""
WORKING_MIB = 64.0
"""The memory of the requests and answers in progress."""
ALLOWED = {201, 429, 503}
"""503: Redis did not answer in time, as on a machine that these clients keep busy."""


@dataclass(frozen=True)
class Attack:
    """``sizes``: of the models' answers in bytes; the clients share them out."""

    name: str
    sizes: tuple[int, ...]
    lasts_s: float
    max_kept_mib: int = 256


SHORT = Attack("900 KB", (900_000,), 1.0, max_kept_mib=16)
LONG = [
    Attack("900 KB", (900_000,), 8.0),
    Attack("5 KB", (5_000,), 25.0),
    Attack("900 KB and 5 KB", (900_000, 5_000), KEPT_S),
]


@dataclass
class Found:
    """``before``, ``peak`` and ``later``: the resident memory of the gateway and of Redis in MiB."""

    before: list[float]
    peak: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    kept_mib: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)

    def note(self, memory: list[float]) -> None:
        self.peak = [max(pair) for pair in zip(memory, self.peak or memory, strict=True)]


async def test_streams_without_readers_stay_within_their_limit(mortal_triton: EmbeddedTriton, tmp_path: Path) -> None:
    found = await attacked(mortal_triton, tmp_path, SHORT)
    assert found.kept_mib > SHORT.max_kept_mib - 1


@pytest.mark.full
@pytest.mark.timeout(2 * sum(each.lasts_s + LATER_S + 60 for each in LONG))
async def test_streams_without_readers_stay_within_their_limit_for_long(
    mortal_triton: EmbeddedTriton, redis: RedisServer, tmp_path: Path
) -> None:
    redis.keep_in_memory_only()
    rows = []
    for attack in LONG:
        for store in (None, redis):
            found = await attacked(mortal_triton, tmp_path / f"{len(rows)}", attack, store, LATER_S)
            assert found.later[0] - found.before[0] < WORKING_MIB
            rows.append(row_of(attack, found))
            write_kept(rows)


async def attacked(
    triton: EmbeddedTriton, folder: Path, attack: Attack, redis: RedisServer | None = None, later_s: float = 0.0
) -> Found:
    """Measures until ``later_s`` after the attack."""
    async with gateway_of(triton, folder, attack, redis) as gateway:
        processes = [psutil.Process(gateway.process.pid)]
        if redis is not None:
            assert redis.process is not None
            processes.append(psutil.Process(redis.process.pid))
        await sent(gateway, 1, 0.1)
        found = Found(memory_of(processes))
        clients = [
            asyncio.create_task(sent(gateway, attack.sizes[index % len(attack.sizes)], attack.lasts_s))
            for index in range(CLIENTS)
        ]
        while not all(client.done() for client in clients):
            await asyncio.sleep(0.05)
            found.note(memory_of(processes))
        found.statuses = sum((client.result() for client in clients), Counter())
        found.kept_mib = gateway.metric("kept_stream_bytes") / MIB
        await asyncio.sleep(later_s)
        found.later = memory_of(processes)
        found.statuses += await sent(gateway, 1, 0.1)
    assert set(found.statuses) <= ALLOWED
    assert found.kept_mib <= attack.max_kept_mib
    for peak, before in zip(found.peak, found.before, strict=True):
        assert peak - before < attack.max_kept_mib * OVERHEAD + WORKING_MIB
    return found


@asynccontextmanager
async def gateway_of(
    triton: EmbeddedTriton, folder: Path, attack: Attack, redis: RedisServer | None
) -> AsyncIterator[GatewayProcess]:
    named = {
        "triton_url": triton.grpc_url,
        "config": str(await asyncio.to_thread(config_in, folder)),
        "max_kept_bytes": str(attack.max_kept_mib * MIB),
        "log_level": "warning",
    }
    if redis is not None:
        named["redis_url"] = redis.url
    context = running_gateway(folder / "gateway", **named)
    gateway = await asyncio.to_thread(context.__enter__)
    try:
        yield gateway
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def config_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = folder / "gateway.yaml"
    pipeline = {
        "model": "scripted_stream",
        "inputs": {"script": {"tensor": "SCRIPT", "kind": "text"}},
        "outputs": {"text": {"tensor": "TEXT", "kind": "text"}},
        "stream": {"resume_s": RESUME_S},
    }
    config.write_text(yaml.safe_dump({"pipelines": {"stream": pipeline}}))
    return config


async def sent(gateway: GatewayProcess, size: int, lasts_s: float) -> Counter[int]:
    """The statuses of one client. The gateway closes a connection whose request it rejects before the body."""
    connection, ends, statuses = await Connection.to(gateway), time.monotonic() + lasts_s, Counter[int]()
    while time.monotonic() < ends:
        connection.post("/v1/streams", body_of(size))
        status = await connection.answer()
        statuses[status] += 1
        if status != 201:
            await connection.close()
            connection = await Connection.to(gateway)
    await connection.close()
    return statuses


def body_of(size: int) -> bytes:
    script = json.dumps({"outputs": 1, "bytes": size})
    return json.dumps({"pipeline": "stream", "inputs": {"script": script}}).encode()


def memory_of(processes: list[psutil.Process]) -> list[float]:
    return [each.memory_info().rss / MIB for each in processes]


def row_of(attack: Attack, found: Found) -> list[str]:
    store = "memory" if len(found.before) == 1 else "Redis"
    statuses = ", ".join(f"{count:,} times {status}" for status, count in sorted(found.statuses.items()))
    memory = [" / ".join(f"{mib:.0f}" for mib in each) for each in (found.before, found.peak, found.later)]
    return [attack.name, f"{attack.lasts_s:g}", store, statuses, f"{found.kept_mib:.0f}", *memory]


def write_kept(rows: list[list[str]]) -> None:
    columns = ["answers", "s", "store", "statuses", "kept, MiB", "before", "peak", f"{LATER_S:g} s later"]
    summary = [
        (
            f"Unread streams of {answers}, in {store}",
            f"{statuses}, in {lasts_s} s",
            f"{kept} of {LONG[0].max_kept_mib} MiB kept",
            f"{before}; peak {peak}; {later} after {LATER_S:g} s",
        )
        for answers, lasts_s, store, statuses, kept, before, peak, later in rows
    ]
    write_part(
        "4-kept",
        summary,
        "## Resumable streams that nobody reads\n\n"
        f"{CLIENTS} connections only send `POST /v1/streams`. The limit of kept events is {LONG[0].max_kept_mib} MiB. "
        "The last three columns are the resident memory in MiB of the gateway, and of Redis if it is the store.\n\n"
        + table(columns, rows),
    )
