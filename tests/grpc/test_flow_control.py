"""The client's receive windows with random messages, frames and readers, and a peer that never exceeds a window.

A call stalls if its reader waits for a message and the windows do not let the peer send it. Without a network this is
visible at once, without a timeout.
"""

import asyncio
from random import Random
from typing import Any, cast

import pytest

from app.grpc.calls import PREFIX_BYTES, Http2StreamCall, Http2UnaryCall
from app.grpc.connection import Http2Connection, KeepAlive
from app.grpc.frames import PeerLimits
from app.grpc.http2_session import Session
from tests.toolkit.strict_peer import Call, Script, StrictPeer, message_of, request_of

LIMIT = 64 * 1024 * 1024
TIMEOUT_S = 600.0
WINDOWS = (64, 300, 4096, PeerLimits().stream_window)
WINDOW = PeerLimits().stream_window


class Transport:
    """Passes the client's bytes to the peer."""

    def __init__(self, peer: StrictPeer) -> None:
        self._peer = peer

    def write(self, data: bytes) -> None:
        self._peer.receive(data)

    def writelines(self, parts: list[bytes]) -> None:
        self._peer.receive(b"".join(parts))

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


class Exchange:
    """A connection of the client and its peer."""

    def __init__(self, random: Random, scripts: list[Script], window: int = WINDOW) -> None:
        self.random = random
        self.peer = StrictPeer(random, scripts.__getitem__, pads=True)
        self.connection = Http2Connection(Session(PeerLimits(stream_window=window)), KeepAlive(TIMEOUT_S, TIMEOUT_S))
        self.connection.connection_made(cast("asyncio.Transport", Transport(self.peer)))
        self.receive(self.peer.take_output())

    def receive(self, data: bytes) -> None:
        """Passes bytes of the peer to the client, cut anywhere."""
        cut = self.random.randrange(len(data) + 1) if self.random.random() < 0.3 else 0
        for part in (data[:cut], data[cut:]):
            if part:
                self.connection.data_received(part)

    def send(self) -> bool:
        """Passes the next frame of the peer to the client. Returns False if the peer may not send."""
        data = self.peer.take_output() + self.peer.send()
        self.receive(data)
        return bool(data)

    def close(self) -> None:
        self.connection.connection_lost(None)


class Reader:
    """Reads one call, a message with each :meth:`step`."""

    def __init__(self, exchange: Exchange, seed: int, *, is_stream: bool) -> None:
        kind = Http2StreamCall if is_stream else Http2UnaryCall
        self.call: Any = kind(exchange.connection, LIMIT)
        self.call.start(b"", request_of(seed, exchange.random.choice((0, 10, 200_000))), TIMEOUT_S)
        self.messages: list[bytes] = []
        self.is_over = False
        self._is_stream = is_stream
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def step(self) -> None:
        """Begins to read the next message, unless the reader waits for it."""
        if not self.is_waiting:
            self._reading = asyncio.create_task(self._read())
        await asyncio.sleep(0)

    async def _read(self) -> None:
        try:
            self.messages.append(await (anext(self.call) if self._is_stream else self.call.response()))
            self.is_over = not self._is_stream
        except StopAsyncIteration:
            self.is_over = True

    def max_window(self, window: int, call: Call) -> int:
        """Returns the largest allowed window of the peer: for one window, or for the message that the reader awaits."""
        if not self._is_stream:
            return max(window, call.rest)
        read = sum(len(each) + PREFIX_BYTES for each in self.messages)
        sizes = [len(each) + PREFIX_BYTES for each in call.script.messages[len(self.messages) :]] if call.script else []
        return max(window, sizes[0] if sizes and self.is_waiting else 0, call.sent - read) - (call.sent - read)


async def exchanged(random: Random) -> int:
    """Runs some calls on one connection. Returns their number."""
    window = random.choice(WINDOWS)
    kinds = [random.random() < 0.8 for _ in range(random.randint(1, 4))]
    scripts = [
        Script([message_of(random, 3 * window) for _ in range(random.randint(0, 5) if is_stream else 1)])
        for is_stream in kinds
    ]
    exchange = Exchange(random, scripts, window)
    readers = [Reader(exchange, seed, is_stream=is_stream) for seed, is_stream in enumerate(kinds)]
    pace = random.random()
    open_readers = list(readers)
    await asyncio.sleep(0)
    while open_readers:
        is_sent = random.random() < pace and exchange.send()
        reader = random.choice(open_readers)
        if not is_sent and all(each.is_waiting for each in open_readers):
            is_sent = exchange.send()
            assert is_sent, "the readers wait, and the windows stop the peer"
        await reader.step()
        for seed, each in enumerate(readers):
            call = exchange.peer.calls.get(2 * seed + 1)
            assert call is None or call.window <= each.max_window(window, call), "the window is too large"
        open_readers = [each for each in open_readers if not each.is_over]
    assert [each.messages for each in readers] == [script.messages for script in scripts]
    exchange.close()
    return len(readers)


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(7200)])])
async def test_no_call_stalls(count: int) -> None:
    done, seed = 0, 0
    while done < count:
        try:
            done += await exchanged(Random(seed))
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
        seed += 1
