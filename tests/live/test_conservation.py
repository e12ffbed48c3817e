"""Every accepted request ends in exactly one outcome: what clients saw is what the gateway counted."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.domain.errors import GatewayError, Outcome
from tests.domain.test_errors import concrete
from tests.live.conftest import GatewayProcess, running_gateway, scripted_models
from tests.live.events import checked, parsed
from tests.live.test_cancellation import eventually

SCRIPTS: list[tuple[str, dict[str, Any]]] = [
    ("ok", {"outputs": 3}),
    ("ok", {"outputs": 0}),
    ("ok", {"outputs": 20, "bytes": 2000}),
    ("early_exit", {"outputs": 1, "then": "error", "error": {"code": "INTERNAL", "message": "EARLY_EXIT[nothing]"}}),
    ("model_error", {"outputs": 2, "then": "error"}),
    ("model_error", {"outputs": 0, "then": "error"}),
    ("contract_violation", {"outputs": 3, "items": [1, 9]}),
    ("cancelled", {"outputs": 200, "interval_s": 0.01}),
    ("client_error", {}),
]
PATH = "/v1/pipelines/scripted_stream/stream"
CLIENTS = 16
CHAOS = 5_000
KILLS = 3
LEAVE_AT = 2
"""Outputs."""
OUTCOMES = {error.code: error.outcome for error in concrete(GatewayError)}
AWAY_S = 0.2
"""Between two requests of a client that was told to come later."""


async def test_the_sum_of_outcomes_is_what_was_sent(gateway: GatewayProcess) -> None:
    before = counted(gateway)
    work = chosen(300)
    seen = await outcomes_of(gateway, work)
    assert seen == Counter(outcome for outcome, _ in work)
    await asyncio.to_thread(eventually, lambda: counted(gateway) - before == seen, 15.0)
    assert gateway.metric("active_streams") == 0


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_it_is_so_while_triton_is_killed_again_and_again(embedding_gateway: GatewayProcess) -> None:
    """The gateway starts it again. Whoever left in that moment may be counted as one whom Triton left."""

    def now_and_then(done: int) -> None:
        if done % (CHAOS // (KILLS + 1)) == 0 and done < CHAOS:
            triton_of(embedding_gateway).kill()

    seen = await outcomes_of(embedding_gateway, chosen(CHAOS), now_and_then)
    assert seen.total() == CHAOS
    assert seen[Outcome.UNAVAILABLE] > 0
    assert seen[Outcome.INTERNAL] == 0
    await asyncio.to_thread(eventually, lambda: counted(embedding_gateway).total() == CHAOS, 15.0)
    others = counted(embedding_gateway) - seen
    left_alone = seen - counted(embedding_gateway)
    assert set(left_alone) <= {Outcome.CANCELLED}
    assert set(others) <= {Outcome.UNAVAILABLE, Outcome.TIMEOUT}
    assert left_alone.total() <= CLIENTS * KILLS
    assert embedding_gateway.metric("active_streams") == 0


@pytest.fixture
def embedding_gateway(models_venv: Path, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway that runs a Triton of its own, with the scripted models alone."""
    models = scripted_models(tmp_path / "models")
    config = Path(__file__).parent / "gateway.yaml"
    with running_gateway(
        tmp_path / "gateway",
        embedded="true",
        embedded_repository=str(models),
        embedded_venv=str(models_venv),
        config=str(config),
        drain_s="1",
    ) as gateway:
        yield gateway


def chosen(count: int) -> list[tuple[str, dict[str, Any]]]:
    return random.Random(count).choices(SCRIPTS, k=count)


async def outcomes_of(
    gateway: GatewayProcess, work: list[tuple[str, dict[str, Any]]], on_done: Callable[[int], None] = lambda done: None
) -> Counter[str]:
    """As the clients saw them."""
    seen: Counter[str] = Counter()
    waiting = iter(work)

    async def client(session: httpx.AsyncClient) -> None:
        for outcome, words in waiting:
            body = {"scrypt": ""} if outcome == "client_error" else {"script": json.dumps(words)}
            ending = await leaving(session, body) if outcome == "cancelled" else await staying(session, body)
            seen[ending] += 1
            on_done(seen.total())
            if ending == Outcome.UNAVAILABLE:
                await asyncio.sleep(AWAY_S)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    return seen


async def staying(session: httpx.AsyncClient, body: dict[str, str]) -> str:
    answer = await session.post(PATH, json=body)
    return outcome_of(answer.status_code, answer.text)


async def leaving(session: httpx.AsyncClient, body: dict[str, str]) -> str:
    lines = []
    async with session.stream("POST", PATH, json=body) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            if line == f"id: {LEAVE_AT}":
                return Outcome.CANCELLED
    return outcome_of(answer.status_code, "\n".join([*lines, ""]))


def outcome_of(status: int, text: str) -> str:
    if status != 200:
        return OUTCOMES[json.loads(text)["code"]]
    end = checked(parsed(text))[-1]
    if end.name == "error":
        return OUTCOMES[end.data["code"]]
    return Outcome.EARLY_EXIT if end.data["early_exit"] else Outcome.OK


def counted(gateway: GatewayProcess) -> Counter[str]:
    """What the gateway counted so far."""
    labels = {"pipeline": "scripted_stream", "transport": "stream"}
    counts = {outcome: int(gateway.metric("requests_total", outcome=outcome, **labels)) for outcome in Outcome}
    return +Counter(counts)


def triton_of(gateway: GatewayProcess) -> psutil.Process:
    below = psutil.Process(gateway.process.pid).children(recursive=True)
    return next(process for process in below if process.name() == "tritonserver")
