"""A closed connection leaves nothing to the garbage collector, so that its memory is free as soon as it has ended."""

import time
from collections.abc import Callable, Iterator
from itertools import count, cycle

import httpx
import psutil
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.report import CLOSED_S, write_part
from tests.live.chaos.stand import HERE, levels_of
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.raw_http import dialed, post, received
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import BINARY, CLOSE, CONTINUATION, TEXT, RawSocket, frame, handshake, script

LARGE = 7_500_000
CONNECTIONS = 5
"""Of each kind in the short form."""
MAX_GROWTH_MIB = 32.0
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
        settings = {"triton_url": mortal_triton.grpc_url, "config": str(HERE / "gateway.yaml"), "drain_s": "1"}
        folder, program = tmp_path_factory.mktemp("uncollected"), (str(HERE / "observed_gateway.py"),)
        with running_gateway(folder, program=program, **settings) as gateway:
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


def memory_mib(gateway: GatewayProcess) -> float:
    return float(psutil.Process(gateway.process.pid).memory_info().rss / 2**20)


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
    before = peak = memory_mib(uncollected)
    ends = time.monotonic() + CLOSED_S
    for number, run in zip(count(1), cycle(LARGE_MESSAGES.values())):
        run(uncollected)
        if number % 50 == 0:
            peak = max(peak, memory_mib(uncollected))
            if time.monotonic() > ends:
                break
    settle(uncollected)
    time.sleep(2)  # freed memory is returned a second after the last large request
    after = memory_mib(uncollected)
    kinds = ", ".join(LARGE_MESSAGES)
    write_part(
        "5-closed-connections",
        [
            (
                "Connections with 7.5 MB, one at a time, no garbage collection",
                f"{number:,} in {CLOSED_S:g} s",
                kinds,
                f"{before:.0f} -> {after:.0f}; peak {peak:.0f}",
            )
        ],
        f"## Closed connections\n\nResident memory, MiB: {before:.1f} before, {after:.1f} after, peak {peak:.1f}.\n",
    )
    assert after - before < MAX_GROWTH_MIB
