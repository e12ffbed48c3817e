"""Rejected bodies within the limit of 8 MiB, one alone and eight at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

from benchmarks.attacks.observer import Observation, observed
from benchmarks.attacks.target import MODEL, attacked, connect
from benchmarks.servers import Peer
from benchmarks.spread import percentile
from benchmarks.table import Table

MIB = 1024 * 1024
BODY_BYTES = 8 * MIB - 1024
AT_ONCE = 8
BOUNDARY = b"attack"


@dataclass(frozen=True)
class _Body:
    name: str
    content: bytes
    media_type: str = "application/json"


async def run(rounds: int) -> Sequence[Table]:
    """A new gateway is started for each attack."""
    rows = [await _row(body, rounds) for body in _bodies()]
    columns = ["body", "MiB", "memory of one, times its size", f"of {AT_ONCE} at once"]
    columns += [f"/health/live p50, ms ({AT_ONCE} at once)", "p99", "worst", "status"]
    note = f"Medians of {rounds} rounds. Aimed at: at most 4 times the size; p99 at most 50 ms."
    return [Table("Bodies that are refused", columns, rows, note)]


def _bodies() -> list[_Body]:
    part = b'--%s\r\nContent-Disposition: form-data; name="TEXTS"\r\n\r\n' % BOUNDARY
    return [
        _Body("a list of empty strings", _filled(b'{"TEXTS":[', b'"",', b'""]}')),
        _Body("unknown keys", b"{" + b",".join(islice((b'"key%d":1' % index for index in count()), 580_000)) + b"}"),
        _Body("one key again and again", _filled(b"{", b'"FREE":[],', b'"FREE":[]}')),
        _Body("integers for [384]", _filled(b'{"FIXED":[', b"1,", b"1]}")),
        _Body("integers for [-1], a text at the end", _filled(b'{"FREE":[', b"1,", b'"a"]}')),
        _Body("integers for [-1], a fraction at the end", _filled(b'{"FREE":[', b"1,", b"1.5]}")),
        _Body("lists inside lists", _filled(b'{"FREE":[', b"[],", b"[]]}")),
        _Body("brackets that open", _filled(b'{"FREE":', b"[", b"")),
        _Body("a form of beginnings of its boundary", _filled(part, b"\r\n--attac", b""), _FORM),
    ]


_FORM = f"multipart/form-data; boundary={BOUNDARY.decode()}"


def _filled(start: bytes, middle: bytes, end: bytes) -> bytes:
    return start + middle * ((BODY_BYTES - len(start) - len(end)) // len(middle)) + end


async def _row(body: _Body, rounds: int) -> list[str]:
    seen: dict[int, list[Observation]] = {1: [], AT_ONCE: []}
    statuses = set[str]()
    async with attacked() as target:
        await _post(target, _Body("a small one first", b"{}"))
        for _ in range(rounds):
            for times, observations in seen.items():
                async with observed(target) as observation:
                    statuses.update(await asyncio.gather(*(_post(target, body) for _ in range(times))))
                    await asyncio.sleep(0.2)
                observations.append(observation)
    size, before = len(body.content) / MIB, seen[1][0].before_mib
    growths = [_median([each.peak_mib - before for each in seen[times]]) / size / times for times in seen]
    latencies = [_median([percentile(each.latencies_ms, part) for each in seen[AT_ONCE]]) for part in (50, 99, 100)]
    return [body.name, f"{size:.1f}", *(f"{each:.1f}" for each in [*growths, *latencies]), " ".join(sorted(statuses))]


async def _post(target: Peer, body: _Body) -> str:
    """Sends the body and returns the status."""
    reader, writer = await connect(target.url)
    head = f"POST /v1/pipelines/{MODEL} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {body.media_type}\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body.content))
    writer.write(body.content)
    status = (await reader.readline()).split()[1].decode()
    await reader.read()
    writer.close()
    return status


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
