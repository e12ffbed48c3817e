"""A thousand sessions of a hundred steps: no state mixes while callers leave, models reload, and Triton is killed."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.session_models import Summing, write_model
from tests.live.sessions import kill_triton, wait_for_new_triton
from tests.live.test_sessions import load
from tests.toolkit.connections import Connection
from tests.toolkit.listener import read_answer
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton
from tests.toolkit.raw_http import post as request
from tests.toolkit.waiting import eventually

SESSIONS, STEPS = 1000, 100
CALLERS = 64
LEAVES = 0.03
"""The part of the steps whose caller leaves. It sends the step again over a new connection."""
STAYS_OPEN = 0.05
"""The part of the sessions that their callers never end."""
IDLE_S = 30.0
"""Triton's idle time."""
FORGOTTEN_S = 4 * IDLE_S
"""After this time no ended session has a place any more."""
IDS = {"text": ("STRING", "STRING"), "64": ("UINT64", "INT64"), "32": ("UINT32", "INT32")}


def models() -> dict[str, Summing]:
    """All combinations but the direct scheduler with a text and batches, where Triton 2.51 itself fails steps.

    The finding `session-state` reports that one. Without batches, an instance has one place.
    """
    found = {"text_direct": Summing("STRING", instances=4, idle_s=IDLE_S)}
    for ids, (place, slots), instances, is_direct in product(IDS, enumerate((4, 64)), (1, 2), (True, False)):
        if ids != "text" or not is_direct:
            name = f"{ids}_{'direct' if is_direct else 'oldest'}_{slots}_{instances}"
            found[name] = Summing(IDS[ids][place], 0 if is_direct else slots, slots, instances, IDLE_S)
    return found


MODELS = models()


class Caller:
    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._connection: Connection | None = None

    async def post(
        self, path: str, body: Mapping[str, int], headers: Mapping[str, str], leaves_after_s: float | None = None
    ) -> tuple[int, Any]:
        """Returns status and answer; (0, None) if the connection broke. The next call makes a new connection."""
        lines = [f"{name}: {value}" for name, value in headers.items()]
        try:
            self._connection = self._connection or await Connection.to(self._gateway)
            self._connection.writer.write(request(path, body, *lines))
            if leaves_after_s is not None:
                await asyncio.sleep(leaves_after_s)
                self.close()
                return 0, None
            head, content = await read_answer(self._connection.reader)
        except (OSError, EOFError):
            self.close()
            return 0, None
        if b"connection: close" in head:
            self.close()
        return int(head[9:12]), json.loads(content)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.writer.close()
            self._connection = None


@dataclass
class Run:
    gateway: GatewayProcess
    triton: EmbeddedTriton
    chance: random.Random = field(default_factory=lambda: random.Random(38))
    ends: Counter[str] = field(default_factory=Counter)
    """How the sessions ended: ``complete``, ``left open``, ``lost`` or ``wrong``."""
    wrong: list[str] = field(default_factory=list)

    async def session(self, model: str) -> None:
        connection = Caller(self.gateway)
        self.ends[await self._steps(connection, model, await self.opened(connection, model))] += 1
        connection.close()

    async def opened(self, connection: Caller, model: str) -> str:
        """Waits for a place, and for a Triton that was killed to start again."""
        while (answered := await connection.post(f"/v1/pipelines/{model}/sessions", {}, {}))[0] != 201:
            assert answered[0] in (0, 429, 503), answered
            await asyncio.sleep(0.2)
        return str(answered[1]["url"])

    async def _steps(self, connection: Caller, model: str, url: str) -> str:
        total, is_left = 0, self.chance.random() < STAYS_OPEN
        for number in range(1, (self.chance.randrange(1, STEPS) if is_left else STEPS) + 1):
            value = self.chance.randrange(1000)
            headers = {"X-Session-Step": str(number), "X-Session-End": str(number == STEPS).lower()}
            if self.chance.random() < LEAVES:
                await connection.post(url, {"NUMBER": value}, headers, self.chance.choice((0, 0.005, 0.02)))
            status, answer = await self._answered(connection, url, value, headers)
            if status == 410:
                return "lost"
            total += value
            if status != 200 or (answer["SUM"], answer["STEPS"]) != (total, number):
                self.wrong.append(f"{model} step {number}, sum {total}: {status} {answer}")
                return "wrong"
        return "left open" if is_left else "complete"

    async def _answered(self, connection: Caller, url: str, value: int, headers: Mapping[str, str]) -> tuple[int, Any]:
        """Sends a step again that was refused or whose answer did not come, as a client does."""
        while True:
            status, answer = await connection.post(url, {"NUMBER": value}, headers)
            if status not in (0, 429, 503, 504):
                return status, answer
            await asyncio.sleep(0.1)

    async def with_faults(self, sessions: int) -> None:
        """A fault each time that an equal part of the sessions has ended."""
        kinds = [self._reload, self._kill_triton, self._reload] * 2
        for count, fault in enumerate(kinds, 1):
            while self.ends.total() < count * sessions / (len(kinds) + 1):
                await asyncio.sleep(0.1)
            await asyncio.to_thread(fault)

    def _reload(self) -> None:
        load(self.triton, self.chance.choice(list(MODELS)))

    def _kill_triton(self) -> None:
        wait_for_new_triton(self.gateway, self.triton, kill_triton(self.triton))

    async def fill(self, model: str) -> None:
        """Has a session in every place of the model at the same time. No state and no sequence is left there."""
        connection, urls = Caller(self.gateway), []
        for _ in range(MODELS[model].places):
            url = await self.opened(connection, model)
            urls.append(url)
            status, answer = await self._answered(connection, url, 7, {"X-Session-Step": "1"})
            assert (status, answer["SUM"], answer["STEPS"]) == (200, 7, 1), (model, status, answer)
        assert (await connection.post(f"/v1/pipelines/{model}/sessions", {}, {}))[0] == 429
        for url in urls:
            headers = {"X-Session-Step": "2", "X-Session-End": "true"}
            status, answer = await self._answered(connection, url, 5, headers)
            assert (status, answer["SUM"], answer["STEPS"]) == (200, 12, 2), (model, status, answer)
        connection.close()


@pytest.fixture
def run(tmp_path: Path, models_venv: Path) -> Iterator[Run]:
    repository = tmp_path / "models"
    for name, model in MODELS.items():
        write_model(repository / name, model)
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump({"pipelines": {name: {"model": name, "session": True} for name in MODELS}}))
    options = EmbeddedOptions(repository, models_venv, first_restart_s=0.2)
    with (
        running_triton(options, restarts=True) as triton,
        running_gateway(tmp_path / "gateway", triton_url=triton.grpc_url, config=str(config)) as gateway,
    ):
        yield Run(gateway, triton)


@pytest.mark.full
@pytest.mark.timeout(2400)
async def test_many_sessions_never_mix_their_states(run: Run) -> None:
    order = [list(MODELS)[number % len(MODELS)] for number in range(SESSIONS)]
    run.chance.shuffle(order)
    waiting = iter(order)

    async def caller() -> None:
        for model in waiting:
            await run.session(model)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run.with_faults(SESSIONS))
        for _ in range(CALLERS):
            tasks.create_task(caller())
    assert run.wrong == []
    assert run.ends.total() == SESSIONS, run.ends
    assert run.ends["complete"] > SESSIONS / 2, run.ends
    await asyncio.to_thread(eventually, lambda: run.gateway.metric("open_sessions") == 0, FORGOTTEN_S)
    for model in MODELS:
        async with asyncio.timeout(FORGOTTEN_S):
            await run.fill(model)
    await asyncio.to_thread(eventually, lambda: run.gateway.metric("open_sessions") == 0)
    assert run.gateway.metric("requests_running_by_pipeline") == 0
