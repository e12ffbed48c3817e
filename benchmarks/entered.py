"""`python -m benchmarks entered`: how much code a request enters, that is, how much a reader of it must read.

A gateway runs under ``sys.setprofile`` in front of a real Triton, over real connections. Each case is repeated; a
function counts if every repetition enters it. Background tasks do not count. A coroutine counts also if it is only
resumed to resume the one that it awaits, as those that opened a stream are for each event.
"""

import asyncio
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import httpx

from app.cli import main
from benchmarks.contents import json_of
from benchmarks.load.orders import HttpAsk
from benchmarks.servers import ROOT, running_gateway, running_triton
from benchmarks.table import Table

APP = f"{ROOT / 'app'}/"
WARM = 50
"""Requests before the count, so that what runs once or seldom does not count."""
EVENTS = 40
LEAST = 5
"""A function that is entered less often during these events belongs to a background task."""
JSON = {"content-type": "application/json"}
POST = HttpAsk("/v1/pipelines/bench_identity", json_of(input=[1.5, 2.5, 3.5, 4.5]))
STREAM = HttpAsk("/v1/pipelines/bench_stream/stream", json_of(count=100, interval_ms=5))
CHAT = HttpAsk(
    "/v1/chat/completions",
    json_of(model="bench_llm", messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=400),
)

Entered = frozenset[tuple[str, str]]
"""Files of ``app`` and the qualified names of their functions."""


Recorder = Callable[[int], Entered]
"""Returns the functions that the gateway has entered since the last call, at least as often as given."""


async def run(rounds: int) -> list[Table]:
    async with _recorded_gateway() as (gateway, recorder):
        cases: dict[str, Callable[[], Awaitable[Entered]]] = {
            "one small POST": lambda: _post(gateway, recorder),
            "one event of a stream": lambda: _event(gateway, recorder, STREAM),
            "one chunk of a chat": lambda: _event(gateway, recorder, CHAT),
        }
        for _ in range(WARM):
            await _post(gateway, recorder)
        found = {
            name: frozenset.intersection(*[await _once(case) for _ in range(rounds)]) for name, case in cases.items()
        }
    return [_totals(found), *(_listing(name, entered) for name, entered in found.items())]


async def _once(case: Callable[[], Awaitable[Entered]]) -> Entered:
    """Repeats a case whose events the gateway had sent before they were counted: its client was slow."""
    return await case() or await _once(case)


async def _post(gateway: httpx.AsyncClient, recorder: Recorder) -> Entered:
    recorder(1)
    answer = await gateway.post(POST.path, content=POST.body, headers=JSON)
    answer.raise_for_status()
    await asyncio.sleep(0.02)  # the gateway logs a request after its answer
    return recorder(1)


async def _event(gateway: httpx.AsyncClient, recorder: Recorder, ask: HttpAsk) -> Entered:
    async with gateway.stream("POST", ask.path, content=ask.body, headers=JSON) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data:"))
        for _ in range(10):
            await anext(lines)
        recorder(1)
        for _ in range(EVENTS):
            await anext(lines)
        entered = recorder(LEAST)
        async for _ in lines:  # otherwise the next case would record the cancellation of this stream
            pass
        return entered


def _totals(found: dict[str, Entered]) -> Table:
    rows = []
    for name, entered in found.items():
        files = {Path(file) for file, _ in entered}
        rows.append([name, str(len(entered)), str(len(files)), str(len({file.parent for file in files}))])
    return Table("Code of app/ that is entered", ["", "functions", "files", "folders"], rows)


def _listing(name: str, entered: Entered) -> Table:
    files = sorted({file for file, _ in entered})
    rows = [[file, ", ".join(sorted(f"`{function}`" for each, function in entered if each == file))] for file in files]
    return Table(name, ["file", "functions"], rows)


@asynccontextmanager
async def _recorded_gateway() -> AsyncIterator[tuple[httpx.AsyncClient, Recorder]]:
    with TemporaryDirectory(prefix="benchmark-") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/recorder")
        listening.listen()
        program = ("-m", "benchmarks.entered", f"{folder}/recorder")
        with running_triton(Path(folder)) as triton:
            async with (
                running_gateway("recorded", triton, Path(folder), {}, program=program) as peer,
                httpx.AsyncClient(base_url=peer.url) as client,
            ):
                control, _ = listening.accept()
                with control, control.makefile("rw") as lines:

                    def recorded(least: int) -> Entered:
                        lines.write(f"{least}\n")
                        lines.flush()
                        return frozenset(map(tuple, json.loads(lines.readline())))

                    yield client, recorded


def record(control: socket.socket) -> None:
    """Records in a thread the functions that all other threads enter. A line from the other end asks for them."""
    entered = Counter[CodeType]()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            entered[frame.f_code] += 1

    def listen() -> None:
        with control.makefile("rw") as lines:
            for least in lines:
                often = [code for code, times in list(entered.items()) if times >= int(least)]
                lines.write(f"{json.dumps(sorted(_names_of(often)))}\n")
                entered.clear()
                lines.flush()

    threading.Thread(target=listen, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)


def _names_of(codes: Iterable[CodeType]) -> set[tuple[str, str]]:
    """Generator expressions and lambdas belong to the function that has them."""
    return {
        (code.co_filename.removeprefix(APP), code.co_qualname)
        for code in codes
        if code.co_filename.startswith(APP) and not code.co_name.startswith("<")
    }


if __name__ == "__main__":
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    record(connection)
    sys.argv = ["triton-gateway", "serve"]
    main()
