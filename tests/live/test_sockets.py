"""WebSockets with the real Triton: requests, errors, keys, origins, drain, the end of a client, hostile clients."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import psutil
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.docs.pages import ROOT, blocks_of
from tests.toolkit.connections import dialed, post, rest
from tests.toolkit.keys import entry, key_text, write_keys
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway, live_gateway
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    RawSocket,
    event_of,
    events_of,
    frame,
    handshake,
    opened,
    script,
)

CONFIG = str(LIVE / "gateway.yaml")
ENDLESS = {"outputs": 100_000, "interval_s": 0.01}


async def closed(client: ClientConnection) -> tuple[int, str]:
    """Reads to the end. Returns the code and the reason of the server's close frame."""
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionClosed):
            while True:
                await client.recv()
    assert client.close_code is not None
    return client.close_code, client.close_reason or ""


async def refusal(gateway: GatewayProcess, pipeline: str, **options: Any) -> tuple[int, str]:
    """Returns the status and the code of a handshake that fails."""
    with pytest.raises(InvalidStatus) as failed:
        await opened(gateway, pipeline, **options)
    response = failed.value.response
    return response.status_code, json.loads(response.body or b"")["code"]


async def test_a_message_is_a_request_and_its_events_are_those_of_sse(gateway: GatewayProcess) -> None:
    labels = {"pipeline": "scripted_stream"}

    def counted() -> tuple[float, float]:
        requests = gateway.metric("requests_total", **labels, transport="websocket", outcome="ok")
        return requests, gateway.metric("websockets_total", **labels, reason="client")

    before, named = counted(), {"X-Request-ID": "counted"}
    async with opened(gateway, "scripted_stream", compression="deflate", additional_headers=named) as client:
        assert client.response is not None
        assert "Sec-WebSocket-Extensions" not in client.response.headers, "compression is not negotiated"
        for number in (1, 2):
            await client.send(script(outputs=2))
            *outputs, done = await events_of(client, number)
            assert [name for name, _ in outputs] == ["output", "output"]
            assert outputs[0][1]["text"]
            assert done == ("done", {"reason": "complete", "early_exit": None, "outputs": 2, "request_id": ANY})
        assert gateway.metric("open_websockets", **labels) == 1
    await asyncio.to_thread(eventually, lambda: gateway.metric("open_websockets", **labels) == 0)
    assert counted() == (before[0] + 2, before[1] + 1)
    (line,) = gateway.log_lines(done[1]["request_id"])
    assert (line["pipeline"], line["transport"], line["outcome"]) == ("scripted_stream", "websocket", "ok")
    (line,) = gateway.log_lines("counted")
    assert (line["message"], line["reason"], line["requests"]) == ("websocket ended", "client", 2)


async def test_a_binary_message_is_the_only_file(gateway: GatewayProcess) -> None:
    """The parameters of binary messages are in the query."""
    async with opened(gateway, "scripted_large", "?sleep_ms=1") as client:
        await client.send(bytes([1, 2, 3]))
        (_, output), (name, _) = await events_of(client, 1)
        assert (name, output["sum"]) == ("done", 6)
    async with opened(gateway, "scripted_large", "?sleep_ms=6000") as client:
        await client.send(bytes([1, 2, 3]))
        ((name, problem),) = await events_of(client, 1)
        assert (name, problem["code"]) == ("error", "invalid_input")


async def test_errors_are_events_and_the_websocket_stays_open(gateway: GatewayProcess) -> None:
    async with opened(gateway, "scripted_stream") as client:
        messages = {
            "{": "invalid_json",
            '{"scripts": "{}"}': "invalid_input",
            b"\0": "unsupported_media_type",
            script(outputs=1, then="error", error={"code": "INTERNAL", "message": "no"}): "model_error",
        }
        for number, (message, code) in enumerate(messages.items(), 1):
            await client.send(message)
            name, problem = (await events_of(client, number))[-1]
            assert (name, problem["code"]) == ("error", code)
            assert problem["detail"].startswith("A binary message is accepted only by") == isinstance(message, bytes)
            assert problem["request_id"].endswith(f".{number}")


async def test_requests_run_at_the_same_time_and_further_ones_wait(gateway: GatewayProcess) -> None:
    async with opened(gateway, "scripted_patient") as client:
        for _ in range(10):
            await client.send(script(outputs=2, interval_s=0.3))
        begun: list[int] = []
        ended: list[int] = []
        while len(ended) < 10:
            name, number, _ = await event_of(client)
            (begun if name == "output" else ended).append(number)
        assert sorted(ended) == list(range(1, 11))
        assert sorted(begun) == sorted([*range(1, 11)] * 2)
        assert {9, 10}.isdisjoint(begun[:8])


@pytest.mark.parametrize("reason", ["lost", "client"])
async def test_the_end_of_a_connection_cancels_its_requests(
    gateway: GatewayProcess, tmp_path: Path, reason: str
) -> None:
    before = gateway.metric("websockets_total", reason=reason)
    client = await opened(gateway, "scripted_patient")
    for number in range(2):
        await client.send(script(**ENDLESS, notice=str(tmp_path / str(number))))
    while {number for _, number, _ in [await event_of(client) for _ in range(4)]} != {1, 2}:
        pass
    if reason == "lost":
        client.transport.abort()
    else:
        await client.close()
    await asyncio.to_thread(eventually, lambda: len(list(tmp_path.iterdir())) == 2)
    await asyncio.to_thread(eventually, lambda: gateway.metric("websockets_total", reason=reason) == before + 1)


HEAD = b"GET /v1/pipelines/scripted/session HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
PIPELINED = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"


def replaced(old: bytes, new: bytes) -> bytes:
    return handshake("scripted").replace(old, new)


REFUSED = {
    "no connection header": (replaced(b"Connection: Upgrade\r\n", b""), 426, "upgrade_required"),
    "h2c": (HEAD + b"Upgrade: h2c\r\n\r\n", 426, "upgrade_required"),
    "two upgrades": (replaced(b"Upgrade: websocket", b"Upgrade: h2c\r\nUpgrade: WebSocket"), 426, "upgrade_required"),
    **{
        f"version {each.decode()}": (replaced(b"Version: 13", b"Version: " + each), 426, "upgrade_required")
        for each in (b"8", b"12", b"25", b"13, 8")
    },
    "no key": (HEAD + b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n", 400, "invalid_request"),
    "data before the answer": (handshake("scripted") + b"\x81\x80\0\0\0\0", 400, "invalid_request"),
    "POST": (HEAD.replace(b"GET", b"POST") + b"Content-Length: 0\r\n\r\n", 405, "method_not_allowed"),
    "unknown pipeline": (handshake("unknown"), 404, "unknown_pipeline"),
    "origin": (handshake("scripted", "Origin: https://other.example"), 403, "forbidden"),
    "another address": (handshake("x").replace(b"/v1/pipelines/x/session", b"/health/live"), 200, ""),
}
"""What is sent, and the status and the code of the answer. The last one is answered as any GET."""
KEPT = {"h2c", "no key", "POST", "data before the answer"}
"""The gateway may keep the connections of these, which are no handshakes."""


def test_a_refused_websocket_closes_the_connection(gateway: GatewayProcess) -> None:
    """A proxy that does not look at the status passes on what follows unread. RFC 6455, 4.4: the right version."""
    for name, (content, status, code) in REFUSED.items():
        answer = answer_to(gateway, content) if name in KEPT else answer_to(gateway, content + PIPELINED, is_last=True)
        assert answer.startswith(b"HTTP/1.1 %d " % status), name
        assert not code or f'"code":"{code}"'.encode() in answer, name
        if name not in KEPT:
            assert b"connection: close" in answer, name
            assert answer.count(b"HTTP/1.1 ") == 1, name
        assert not name.startswith("version") or b"sec-websocket-version: 13" in answer


def answer_to(gateway: GatewayProcess, content: bytes, *, is_last: bool = False) -> bytes:
    """The first answer; with ``is_last`` all that the gateway sends until it closes the connection."""
    with dialed(gateway) as connection:
        connection.sendall(content)
        return rest(connection) if is_last else connection.recv(65536)


KEYS = [entry("all"), entry("one", pipelines=["scripted"])]
protected = live_gateway(Path(CONFIG).read_text(), keys=KEYS, cors_origins="https://app.example")


ONE = {"X-API-Key": key_text("one")}


async def test_keys_and_origins_of_websockets(protected: GatewayProcess) -> None:
    ways: list[dict[str, Any]] = [
        {"additional_headers": {"Authorization": f"Bearer {key_text('one')}"}},
        {"additional_headers": ONE},
        {"subprotocols": ["triton-gateway", f"bearer.{key_text('one')}"]},
    ]
    for options in ways:
        async with opened(protected, "scripted", **options) as client:
            assert client.subprotocol == ("triton-gateway" if "subprotocols" in options else None)
            await client.send(script())
            assert (await events_of(client, 1))[-1][0] == "done"
    for origin in ("https://app.example", protected.url):
        async with opened(protected, "scripted", origin=origin, additional_headers=ONE):
            pass
    both = [f"bearer.{key_text('one')}", f"bearer.{key_text('all')}"]
    wrong = ([], ["triton-gateway"], ["triton-gateway", "bearer.wrong"], ["triton-gateway", *both])
    refused: list[tuple[str, dict[str, Any], tuple[int, str]]] = [
        *(("scripted_stream", options, (403, "forbidden")) for options in ways),
        *(("scripted", {"subprotocols": each} if each else {}, (401, "unauthenticated")) for each in wrong),
        *(
            ("scripted", {"additional_headers": ONE, "origin": each}, (403, "forbidden"))
            for each in ("https://other.example", "null")
        ),
    ]
    for pipeline, options, expected in refused:
        assert await refusal(protected, pipeline, **options) == expected, options


SPELLINGS = {
    "/v1/pipelines/scripted": 401,
    "/v1/pipelines/%73cripted": 401,
    "//v1/pipelines/scripted": 404,
    "/v1//pipelines/scripted": 404,
    "/health/../v1/pipelines/scripted": 404,
    "/v1/pipelines/scripted?x=/health/live": 401,
    "http://x/v1/pipelines/scripted": 401,
}


@pytest.mark.parametrize("path", SPELLINGS)
def test_each_spelling_of_an_address_needs_a_key(protected: GatewayProcess, path: str) -> None:
    """The gateway answers although a client never sends the body."""
    assert int(answer_to(protected, post(path, b"", size=4_000_000)).split()[1]) == SPELLINGS[path]


async def test_a_removed_key_ends_the_websocket(protected: GatewayProcess) -> None:
    path = protected.log_path.parents[1] / "keys.yaml"
    async with opened(protected, "scripted", subprotocols=["triton-gateway", f"bearer.{key_text('all')}"]) as client:
        write_keys(path, entry("one", pipelines=["scripted"]))
        headers = {"Authorization": f"Bearer {key_text('all')}"}
        url = f"{protected.url}/v1/pipelines"
        await asyncio.to_thread(eventually, lambda: httpx.get(url, headers=headers).status_code == 401)
        await client.send(script())
        name, problem = (await events_of(client, 1))[-1]
        assert (name, problem["code"]) == ("error", "unauthenticated")
        assert await closed(client) == (1008, "unauthenticated")


async def test_the_drain_ends_idle_websockets_and_waits_for_requests(start_gateway: StartGateway) -> None:
    """At its end it ends the requests that still run with an error."""
    draining = start_gateway(config=CONFIG, drain_s="3")
    async with AsyncExitStack() as stack:
        idle, busy, endless = [await stack.enter_async_context(opened(draining, "scripted_patient")) for _ in range(3)]
        await endless.send(script(**ENDLESS))
        await busy.send(script(outputs=20, interval_s=0.1))
        await event_of(busy)
        draining.process.send_signal(signal.SIGTERM)
        assert await closed(idle) == (1001, "draining")
        names = [name for name, _ in await events_of(busy, 1)]
        assert names == ["output"] * 19 + ["done"]
        assert await closed(busy) == (1001, "draining")
        name, problem = (await events_of(endless, 1))[-1]
        assert (name, problem["code"]) == ("error", "draining")
        assert await closed(endless) == (1001, "draining")


def test_the_documented_client_works(gateway: GatewayProcess) -> None:
    ((_, text),) = [block for block in blocks_of(ROOT / "docs/reference/websocket.md") if block[0] == "python"]
    program = text.replace("127.0.0.1:8080", gateway.url.removeprefix("http://"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=60)
    *outputs, end = done.stdout.splitlines()
    assert end.startswith("done 1 ")
    assert outputs
    assert all(line.startswith("output 1 ") for line in outputs)


async def test_a_key_has_a_share_of_the_websockets(start_gateway: StartGateway, tmp_path: Path) -> None:
    most = 6
    write_keys(tmp_path / "keys.yaml", entry("one", limits={"websockets": most}), entry("all"))
    gateway = start_gateway(config=CONFIG, max_connections="8", api_keys_file=str(tmp_path / "keys.yaml"))
    one, other = ({"additional_headers": {"X-API-Key": key_text(each)}} for each in ("one", "all"))
    async with AsyncExitStack() as stack:
        for _ in range(most):
            client = await stack.enter_async_context(opened(gateway, "scripted", **one))
        assert await refusal(gateway, "scripted", **one) == (429, "too_many_requests")
        async with opened(gateway, "scripted", **other):
            await client.close()
            await asyncio.to_thread(eventually, lambda: gateway.metric("open_websockets") == most)
            await stack.enter_async_context(opened(gateway, "scripted", **one))


async def test_the_longest_idle_websocket_makes_room(start_gateway: StartGateway) -> None:
    """Not one whose request runs, although it is older. If every one has a request, a connection is refused.

    At the end the clients do not read all that the endless requests have sent before the close frame.
    """
    gateway = start_gateway(config=CONFIG, max_connections="4")
    async with AsyncExitStack() as stack:
        busy, first, second, third = [
            await stack.enter_async_context(opened(gateway, "scripted_patient", close_timeout=0.1)) for _ in range(4)
        ]
        await busy.send(script(**ENDLESS))
        await event_of(busy)
        for client in (first, second):
            await client.send(script(outputs=1))
            await events_of(client, 1)
        await asyncio.sleep(1.2)
        newer = []
        for closes in (third, first):
            newest = await stack.enter_async_context(opened(gateway, "scripted_patient", close_timeout=0.1))
            assert await closed(closes) == (1013, "idle")
            await newest.send(script(outputs=1))
            await events_of(newest, 1)
            newer.append(newest)
        await event_of(busy)
        await second.send(script(outputs=1))
        await events_of(second, 2)
        assert gateway.metric("websockets_total", reason="idle") == 2
        for client in (second, *newer):
            await client.send(script(**ENDLESS))
            await event_of(client)
        await asyncio.sleep(1.2)
        assert (await asyncio.to_thread(httpx.get, f"{gateway.url}/health/live")).status_code == 429
        await event_of(busy)


MIB = 1024 * 1024
GROWTH = 24 * MIB
IDLE, IDLE_BYTES = 5000, 32 * 1024
"""Idle WebSockets, and the limit for the memory of each."""
PIPELINE = "scripted_patient"


SMALLER = Path(CONFIG).read_text().replace("  scripted_large:", "  scripted_large:\n    limits: {body_bytes: 2000000}")
hostile = live_gateway(SMALLER, ping_s="1", send_timeout_s="1", max_body_bytes=str(4 * MIB), drain_s="1")


def memory(gateway: GatewayProcess) -> int:
    return psutil.Process(gateway.process.pid).memory_info().rss


@pytest.mark.parametrize(
    ("frames", "code"),
    [  # the library `websockets` checks the frames themselves; a few of its findings
        pytest.param([frame(TEXT, b"{}", masked=False)], 1002, id="without a mask"),
        pytest.param([frame(TEXT, b"{", fin=False), frame(TEXT, b"}")], 1002, id="two messages at once"),
        pytest.param([bytes([0xC1]) + frame(TEXT, b"{}")[1:]], 1002, id="compressed without being negotiated"),
        pytest.param([frame(CLOSE, (1005).to_bytes(2))], 1002, id="close code that is not allowed"),
        pytest.param([frame(TEXT, b"{", fin=False), frame(CLOSE, (1001).to_bytes(2))], 1001, id="between fragments"),
        pytest.param([frame(TEXT, b'{"script": "\xff"}')], 1007, id="text that is not UTF-8"),
        pytest.param([frame(TEXT, b"\xc3", fin=False), frame(CONTINUATION, b"(")], 1007, id="not UTF-8 in fragments"),
        pytest.param([frame(BINARY, length=100 * MIB)], 1009, id="100 MB declared"),
        pytest.param([frame(BINARY, length=2**63)], 1009, id="2^63 bytes declared"),
        pytest.param(
            [frame(BINARY, bytes(3 * MIB), fin=False), frame(CONTINUATION, length=2 * MIB)], 1009, id="in fragments"
        ),
        pytest.param([frame(TEXT, b"", fin=False), frame(CONTINUATION, fin=False) * 20_000], 1008, id="fragments"),
        pytest.param([frame(PING, b"x" * 100) * 1000], 1008, id="pings"),
        pytest.param([frame(PONG) * 1000], 1008, id="pongs"),
    ],
)
def test_wrong_frames(hostile: GatewayProcess, frames: list[bytes], code: int) -> None:
    with RawSocket(hostile, PIPELINE) as client:
        client.send(*frames)
        assert client.close_code()[0] == code


async def test_a_message_above_the_limit_of_the_pipeline(hostile: GatewayProcess) -> None:
    async with opened(hostile, "scripted_large") as client:
        await client.send(b"\1" * 2_000_000)
        assert (await events_of(client, 1))[0][1]["sum"] == 2_000_000
        await client.send([b"\1" * 1_000_000, b"\1" * 1_000_001])
        assert (await closed(client))[0] == 1009


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(lambda: frame(PING, b"x" * 125) * 100, id="pings"),
        pytest.param(lambda: frame(TEXT, script(outputs=1000, bytes=10_000).encode()), id="requests"),
    ],
)
def test_a_client_that_reads_nothing(hostile: GatewayProcess, flood: Callable[[], bytes]) -> None:
    before, memory_before = hostile.metric("websockets_total"), memory(hostile)
    with RawSocket(hostile, PIPELINE, receive_bytes=4096) as client:
        client.connection.settimeout(0.2)
        for _ in range(200):
            try:
                client.send(flood())
            except OSError:
                break
        eventually(lambda: hostile.metric("websockets_total") == before + 1)
        assert memory(hostile) - memory_before < GROWTH


def test_a_slow_consumer_gets_its_code(start_gateway: StartGateway) -> None:
    gateway = start_gateway(config=CONFIG, send_timeout_s="20")
    with RawSocket(gateway, PIPELINE, receive_bytes=4096) as client:
        client.send(frame(TEXT, script(outputs=1_000, bytes=30_000).encode()))
        eventually(lambda: gateway.metric("requests_total", transport="websocket", outcome="cancelled") == 1)
        assert client.close_code() == (1008, "slow_consumer")
    eventually(lambda: gateway.metric("websockets_total", reason="slow_consumer") == 1)


def test_a_peer_that_does_not_answer_pings(hostile: GatewayProcess) -> None:
    with RawSocket(hostile, PIPELINE) as client:
        assert client.close_code() == (1011, "ping_timeout")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_five_thousand_idle_websockets(start_gateway: StartGateway) -> None:
    """They leave room for other requests, and the drain closes them all."""
    gateway = start_gateway(config=CONFIG, ping_s="600", max_connections=str(IDLE + 100), drain_s="30")
    before = memory(gateway)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawSocket(gateway, PIPELINE)) for _ in range(IDLE)]
        assert gateway.metric("open_websockets", pipeline=PIPELINE) == IDLE
        assert memory(gateway) - before < IDLE * IDLE_BYTES
        answer = httpx.post(f"{gateway.url}/v1/pipelines/scripted", json={"script": json.dumps({"outputs": 1})})
        assert answer.status_code == 200, answer.text
        gateway.process.send_signal(signal.SIGTERM)
        assert {client.close_code() for client in clients} == {(1001, "draining")}
    gateway.process.wait(PATIENCE_S)
