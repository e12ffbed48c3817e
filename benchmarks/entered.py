"""`python -m benchmarks entered`: how much code a request enters, that is, how much a reader of it must read.

A gateway runs under ``sys.setprofile`` in front of a real Triton, over real connections. Each case is repeated; a
function counts if every repetition enters it, so background tasks do not count.
"""

import json
import socket
import sys
import threading
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
EVENTS = 5
"""Together they take less time than the interval of each background task."""
JSON = {"content-type": "application/json"}
POST = HttpAsk("/v1/pipelines/bench_identity", json_of(input=[1.5, 2.5, 3.5, 4.5]))
STREAM = HttpAsk("/v1/pipelines/bench_stream/stream", json_of(count=100, interval_ms=5))
CHAT = HttpAsk(
    "/v1/chat/completions",
    json_of(model="bench_llm", messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=400),
)

Entered = frozenset[tuple[str, str]]
"""Files of ``app`` and the qualified names of their functions."""


class Recorder:
    """The functions that a gateway enters between ``start`` and ``stop``, told over a socket to its other end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def start(self) -> None:
        self._control.sendall(b"start\n")
        assert self._control.recv(16) == b"started\n"

    def stop(self) -> Entered:
        self._control.sendall(b"stop\n")
        with self._control.makefile() as lines:
            return frozenset(map(tuple, json.loads(lines.readline())))


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
    recorder.start()
    answer = await gateway.post(POST.path, content=POST.body, headers=JSON)
    entered = recorder.stop()
    answer.raise_for_status()
    return entered


async def _event(gateway: httpx.AsyncClient, recorder: Recorder, ask: HttpAsk) -> Entered:
    async with gateway.stream("POST", ask.path, content=ask.body, headers=JSON) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data:"))
        for _ in range(10):
            await anext(lines)
        recorder.start()
        for _ in range(EVENTS):
            await anext(lines)
        entered = recorder.stop()
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
                with control:
                    yield client, Recorder(control)


def record(control: socket.socket) -> None:
    """Records in a thread the functions that all other threads enter, when the other end asks for it."""
    entered: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    def listen() -> None:
        with control.makefile("rw") as lines:
            for line in lines:
                if line == "start\n":
                    entered.clear()
                    lines.write("started\n")
                else:
                    lines.write(f"{json.dumps(sorted(_names_of(list(entered))))}\n")
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
