"""Both transports with the same traffic: random messages, frames, windows and paces of reading."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import pytest

from app.grpc.rpc import STATUSES, RpcError, Transport
from tests.toolkit.strict_peer import RESETS, Script, StrictPeer, message_of, request_of
from tests.triton.test_transports import by_asyncio, by_grpcio

TIMEOUT_S = 30.0
LARGEST = 200_000
AT_ONCE = 16
OPEN: dict[str, Callable[[str], Transport]] = {"asyncio": by_asyncio, "grpcio": by_grpcio}


@dataclass
class Outcome:
    messages: list[bytes] = field(default_factory=list)
    code: str = "OK"
    details: str = ""


def is_stream(seed: int) -> bool:
    return seed % 4 > 0


def script_of(seed: int) -> Script:
    random = Random(seed)
    count = random.randint(0, 5) if is_stream(seed) else 1
    messages = [message_of(random, LARGEST) for _ in range(count)]
    end = random.random()
    if end < 0.7:
        return Script(messages)
    if end < 0.9 or not messages:
        code = random.randrange(1, len(STATUSES))
        return Script(messages if is_stream(seed) else [], code=code, text="text of an error"[: random.randrange(17)])
    return Script(messages, end="reset", code=random.choice(list(RESETS)))


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Serves each connection with a strict peer."""
    running: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        random = Random(len(running))
        peer = StrictPeer(random, script_of, pads=False)  # grpcio accepts no padding
        try:
            writer.write(peer.take_output())
            while data := await reader.read(65536):
                peer.receive(data)
                writer.write(peer.take_output())
                while frame := peer.send():
                    writer.write(frame)
                    if random.random() < 0.2:
                        await writer.drain()
                        await asyncio.sleep(random.choice((0, 0, 0.001)))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for task in running:
            task.cancel()


def expected_of(seed: int) -> Outcome:
    script = script_of(seed)
    if script.end == "status":
        return Outcome(script.messages, STATUSES[script.code], script.text)
    text = f"the server reset the stream with HTTP/2 error {script.code}"
    return Outcome(script.messages if is_stream(seed) else [], RESETS[script.code], text)


async def outcome_of(transport: Transport, seed: int) -> Outcome:
    random, outcome = Random(seed), Outcome()
    request = request_of(seed, random.choice((0, 0, 1000, LARGEST)))
    pace_s = random.choice((0.0, 0.0, 0.001, 0.01))
    try:
        if not is_stream(seed):
            outcome.messages.append(await (await transport.unary("/test/Unary", request, TIMEOUT_S)).response())
            return outcome
        call = await transport.stream("/test/Stream", request, TIMEOUT_S)
        async for message in call:
            outcome.messages.append(message)
            await asyncio.sleep(pace_s)
        call.close()
    except RpcError as exc:
        outcome.code, outcome.details = exc.code, exc.details
    return outcome


async def outcomes(url: str, kind: str, seeds: range) -> list[Outcome]:
    transport = OPEN[kind](url)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> Outcome:
        async with room:
            return await outcome_of(transport, seed)

    found = await asyncio.gather(*(one(seed) for seed in seeds))
    await transport.close()
    return found


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
async def test_both_clients_read_the_same(count: int) -> None:
    seeds = range(count)
    async with serving() as url:
        own, reference = [await outcomes(url, kind, seeds) for kind in OPEN]
    for seed in seeds:
        expected = expected_of(seed)
        assert own[seed] == expected, seed
        if script_of(seed).end == "status":
            assert reference[seed] == expected, seed
        else:  # grpcio has its own text, and may discard messages that arrived before the reset
            assert reference[seed].code == expected.code, seed
