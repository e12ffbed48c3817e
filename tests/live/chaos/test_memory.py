"""The memory of the gateway does not grow with requests, streams without a reader, and closed connections."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice, repeat
from pathlib import Path
from statistics import linear_regression

import httpx
import psutil
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos import stand as stands
from tests.live.chaos.client import RESUMABLE, WEBSOCKET, Ask, Reply
from tests.live.chaos.report import CLOSED_S, KEPT_S, REQUESTS, SEED, Row, write_part
from tests.live.chaos.stand import CONFIG, OBSERVED, Stand, levels_of, rss_mib_of, stand_of
from tests.live.chaos.traffic import Traffic
from tests.toolkit.connections import Connection, dialed, post, received
from tests.toolkit.listener import read_answer
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.programs import RedisServer
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import BINARY, CLOSE, CONTINUATION, TEXT, RawSocket, frame, handshake, script

mortal_triton = stands.mortal_triton()

STEPS = 10
"""Measurements of each kind of requests."""
WARM_STEPS = 2
"""The first measurements of each kind, while the gateway still warms up."""
SENDERS = 16
MAX_GROWTH_MIB = 6.0


@pytest.mark.full
@pytest.mark.timeout(REQUESTS / 100 + 300)
async def test_memory_does_not_grow_with_the_number_of_requests(mortal_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Three quarters are the same request repeatedly, the others of every dialect and outcome."""
    rows, growths = [], []
    async with stand_of(mortal_triton, tmp_path / "stand", SEED) as stand:
        traffic = Traffic(SEED, stand.journal)
        for name, asks, part in (("small", repeat(traffic.smallest()), 0.75), ("mixed", mixed(traffic), 0.25)):
            step = int(REQUESTS * part) // STEPS
            rss_mib = await measured(stand, asks, step)
            growths.append(rss_mib[-1] - rss_mib[WARM_STEPS - 1])
            slope = linear_regression(range(STEPS - WARM_STEPS), rss_mib[WARM_STEPS:]).slope * 10_000 / step
            title, memory = f"Memory, {name}, {step:,} a step", f"{rss_mib[WARM_STEPS - 1]:.1f} -> {rss_mib[-1]:.1f}"
            rows.append((title, f"{step * STEPS:,}", f"{slope:+.3f} MiB for each 10,000 requests", memory))
    write_part("3-memory", *rows)
    assert max(growths) < MAX_GROWTH_MIB


def mixed(traffic: Traffic) -> Iterator[Ask]:
    """Without WebSockets and resumable streams: their clients need several steps."""
    while True:
        yield from (ask for ask, _ in traffic.calm(100) if ask.dialect not in {RESUMABLE, WEBSOCKET})


async def measured(stand: Stand, asks: Iterator[Ask], step: int) -> list[float]:
    """The resident memory in MiB after each step."""
    opened = [await asyncio.open_connection("127.0.0.1", stand.port, limit=2**20) for _ in range(SENDERS)]
    connections = [Connection(*each) for each in opened]
    found = []
    for _ in range(STEPS):
        work = islice(asks, step)
        await asyncio.gather(*(send_all(connection, work) for connection in connections))
        await stand.quiet()
        found.append(rss_mib_of(stand.process))
    for connection in connections:
        await connection.close()
    return found


async def send_all(connection: Connection, asks: Iterator[Ask]) -> None:
    for ask in asks:
        connection.writer.write(ask.content.replace(b"Connection: close\r\n", b"", 1))
        reply = Reply.of(b"".join(await read_answer(connection.reader)))
        assert reply is not None
        assert ask.expected in ask.outcomes_of(reply), reply


CLIENTS = 8
LATER_S = 40.0
"""Longer than the ``resume_s`` of the pipeline, so that every stream has expired."""
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


async def test_streams_without_readers_stay_within_their_limit(mortal_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Clients start streams at the full rate and never read them."""
    kept_mib, _ = await attacked(mortal_triton, tmp_path / "stand", SHORT)
    assert kept_mib > SHORT.max_kept_mib - 1


@pytest.mark.full
@pytest.mark.timeout(2 * sum(each.lasts_s + LATER_S + 60 for each in LONG))
async def test_streams_without_readers_stay_within_their_limit_for_long(
    mortal_triton: EmbeddedTriton, redis: RedisServer, tmp_path: Path
) -> None:
    redis.keep_in_memory_only()
    rows = []
    for attack in LONG:
        for store in (None, redis):
            rows.append((await attacked(mortal_triton, tmp_path / f"{len(rows)}", attack, store, LATER_S))[1])
            write_part("4-kept", *rows)


async def attacked(
    triton: EmbeddedTriton, folder: Path, attack: Attack, redis: RedisServer | None = None, later_s: float = 0.0
) -> tuple[float, Row]:
    """Returns the kept MiB, and a row with the memory of the gateway and of Redis until ``later_s`` later."""
    settings = {"max_kept_bytes": str(attack.max_kept_mib * 2**20), "log_level": "warning"}
    async with stand_of(triton, folder, SEED, redis=redis, **settings) as stand:
        processes = [stand.process]
        if redis is not None:
            assert redis.process is not None
            processes.append(psutil.Process(redis.process.pid))
        await sent(stand, 1, 0.1)
        before = peak = [rss_mib_of(each) for each in processes]
        sizes = islice(cycle(attack.sizes), CLIENTS)
        clients = [asyncio.create_task(sent(stand, size, attack.lasts_s)) for size in sizes]
        while not all(client.done() for client in clients):
            await asyncio.sleep(0.05)
            peak = [max(most, rss_mib_of(each)) for most, each in zip(peak, processes, strict=True)]
        statuses: Counter[int] = sum((client.result() for client in clients), Counter())
        kept_mib = stand.gateway.metric("kept_stream_bytes") / 2**20
        await asyncio.sleep(later_s)
        later = [rss_mib_of(each) for each in processes]
        statuses += await sent(stand, 1, 0.1)
    assert set(statuses) <= ALLOWED
    assert kept_mib <= attack.max_kept_mib
    for most, first in zip(peak, before, strict=True):
        assert most - first < attack.max_kept_mib * OVERHEAD + WORKING_MIB
    assert not later_s or later[0] - before[0] < WORKING_MIB
    answers = ", ".join(f"{count:,} times {status}" for status, count in sorted(statuses.items()))
    memory = [" / ".join(f"{mib:.0f}" for mib in each) for each in (before, peak, later)]
    return kept_mib, (
        f"Unread streams of {attack.name}, in {'memory' if redis is None else 'Redis'}",
        f"{answers}, in {attack.lasts_s:g} s",
        f"{kept_mib:.0f} of {attack.max_kept_mib} MiB kept",
        f"{memory[0]}; peak {memory[1]}; {memory[2]} after {later_s:g} s",
    )


async def sent(stand: Stand, size: int, lasts_s: float) -> Counter[int]:
    """The statuses of one client. The gateway closes a connection whose request it rejects before the body."""
    connection, ends, statuses = await Connection.to(stand.gateway), time.monotonic() + lasts_s, Counter[int]()
    body = {"pipeline": "stream", "inputs": {"script": json.dumps({"outputs": 1, "bytes": size})}}
    while time.monotonic() < ends:
        connection.writer.write(post("/v1/streams", body))
        status = await connection.answer()
        statuses[status] += 1
        if status != 201:
            await connection.close()
            connection = await Connection.to(stand.gateway)
    await connection.close()
    return statuses


LARGE = 7_500_000
CONNECTIONS = 5
"""Of each kind in the short form."""
MAX_LARGE_GROWTH_MIB = 32.0
CLOSED_WITHIN_S = 0.05
SESSION_KEPT_S = 0.2
"""How long an ended session is known."""
SMALL_BODY, LARGE_BODY = script().encode(), script(pad="x" * LARGE).encode()
WRONG_BODY = b"{" + b"x" * LARGE
FAILING_BODY = script(**{"raise": "no"}).encode()
STREAM_BODY = script(outputs=100, interval_s=0.02).encode()
WHOLE = frame(TEXT, LARGE_BODY)
HALVES = [frame(TEXT, LARGE_BODY[: LARGE // 2], fin=False), frame(CONTINUATION, LARGE_BODY[LARGE // 2 :], fin=False)]


@pytest.fixture(scope="module")
def uncollected(mortal_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway without garbage collections, except for those of ``levels_of``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SESSION_KEPT_S", str(SESSION_KEPT_S))
        patch.setenv("COLLECTS", "no")
        settings = {"triton_url": mortal_triton.grpc_url, "config": str(CONFIG), "drain_s": "1"}
        with running_gateway(tmp_path_factory.mktemp("uncollected"), program=OBSERVED, **settings) as gateway:
            yield gateway


def websocket(*frames: bytes, until: bytes = b"", pipeline: str = "unary") -> Callable[[GatewayProcess], None]:
    """Sends frames over a new WebSocket, and closes the connection as soon as ``until`` has arrived."""

    def run(gateway: GatewayProcess) -> None:
        with RawSocket(gateway, pipeline) as client:
            client.send(*frames)
            received(client.connection, until)

    return run


def http(content: bytes, until: bytes = b"") -> Callable[[GatewayProcess], None]:
    def run(gateway: GatewayProcess) -> None:
        with dialed(gateway, PATIENCE_S) as connection:
            connection.sendall(content)
            received(connection, until)

    return run


def session_over_http(gateway: GatewayProcess) -> None:
    url = gateway.url + httpx.post(f"{gateway.url}/v1/pipelines/session/sessions").json()["url"]
    assert httpx.post(url, json={"NUMBER": 1}).status_code == 200
    assert httpx.delete(url).status_code == 204


RUN, STREAM = "/v1/pipelines/unary", "/v1/pipelines/stream/stream"
LARGE_MESSAGES = {
    "unfinished": websocket(WHOLE[:-9]),
    "unfinished fragments": websocket(*HALVES),
    "invalid": websocket(frame(TEXT, WRONG_BODY), until=b'"error"'),
    "not UTF-8": websocket(frame(TEXT, b"\xff" * LARGE), until=b"invalid_text"),
    "valid": websocket(WHOLE, until=b'"done"'),
    "abandoned": websocket(WHOLE),
    "unfinished body": http(post(RUN, LARGE_BODY[:-9], size=len(LARGE_BODY))),
    "invalid body": http(post(RUN, WRONG_BODY), until=b'"invalid_json"'),
    "valid body": http(post(RUN, LARGE_BODY), until=b'"text":"hello"'),
    "abandoned body": http(post(RUN, LARGE_BODY)),
    "abandoned stream": http(post(STREAM, LARGE_BODY)),
    "stream of a large body": http(post(STREAM, LARGE_BODY), until=b"event: done"),
}
KINDS = LARGE_MESSAGES | {
    "no message": websocket(),
    "session": websocket(frame(TEXT, b'{"NUMBER": 1}'), WHOLE[:-9], until=b'"done"', pipeline="session"),
    "session over HTTP": session_over_http,
    "message of a failing model": websocket(frame(TEXT, FAILING_BODY), until=b'"error"'),
    "left in the answer": websocket(frame(TEXT, STREAM_BODY), until=b'"output"', pipeline="stream"),
    "close frame": websocket(frame(CLOSE, (1000).to_bytes(2)), until=b"\x88"),
    "against the protocol": websocket(frame(TEXT, b"{}", masked=False), until=b"\x88"),
    "too large": websocket(frame(BINARY, length=2**60), until=b"\x88"),
    "wrong version": http(handshake("unary").replace(b"Version: 13", b"Version: 12"), until=b"HTTP/1.1 426 "),
    "wrong key": http(handshake("unary").replace(b"Key: ", b"Key: _"), until=b"HTTP/1.1 400 "),
    "unknown pipeline": http(handshake("unknown"), until=b"HTTP/1.1 404 "),
    "request": http(post(RUN, SMALL_BODY), until=b'"text":"hello"'),
    "failing model": http(post(RUN, FAILING_BODY), until=b'"model_error"'),
    "chunked body without an end": http(post(RUN, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")),
    "stream": http(post(STREAM, SMALL_BODY), until=b"event: done"),
    "left in the stream": http(post(STREAM, STREAM_BODY), until=b"event: output"),
    "no request": http(b""),
    "invalid head": http(b"GET http:///%%%: HTTP/1.1\r\nHost: localhost\r\n\r\n", until=b"HTTP/1.1 400 "),
}


def settle(gateway: GatewayProcess, kept_s: float = SESSION_KEPT_S) -> None:
    """Waits until the connections have ended, and their sessions are forgotten, which are known for ``kept_s``."""
    gauges = "open_websockets", "open_sessions", "in_flight_requests", "active_streams"
    eventually(lambda: not any(map(gateway.metric, gauges)))
    time.sleep(2 * kept_s)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_connection_leaves_no_circle_of_objects(uncollected: GatewayProcess, kind: str) -> None:
    kept_s = SESSION_KEPT_S if "session" in kind else CLOSED_WITHIN_S
    KINDS[kind](uncollected)
    settle(uncollected, kept_s)
    levels_of(uncollected)
    for _ in range(CONNECTIONS):
        KINDS[kind](uncollected)
    settle(uncollected, kept_s)
    assert levels_of(uncollected).circles < CONNECTIONS


@pytest.mark.full
@pytest.mark.timeout(CLOSED_S + 300)
def test_memory_while_connections_with_large_messages_follow_each_other(uncollected: GatewayProcess) -> None:
    """The limit for request bodies counts what a closed connection had as free: then it is free."""
    for run in LARGE_MESSAGES.values():
        run(uncollected)
    settle(uncollected)
    process = psutil.Process(uncollected.process.pid)
    before = peak = rss_mib_of(process)
    ends = time.monotonic() + CLOSED_S
    for number, run in zip(count(1), cycle(LARGE_MESSAGES.values())):
        run(uncollected)
        if number % 50 == 0:
            peak = max(peak, rss_mib_of(process))
            if time.monotonic() > ends:
                break
    settle(uncollected)
    time.sleep(2)  # freed memory is returned a second after the last large request
    after = rss_mib_of(process)
    write_part(
        "5-closed-connections",
        (
            "Connections with 7.5 MB, one at a time, no garbage collection",
            f"{number:,} in {CLOSED_S:g} s",
            ", ".join(LARGE_MESSAGES),
            f"{before:.0f} -> {after:.0f}; peak {peak:.0f}",
        ),
    )
    assert after - before < MAX_LARGE_GROWTH_MIB
