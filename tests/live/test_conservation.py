"""Every accepted request ends in exactly one outcome: what clients saw is what the gateway counted."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.live.conftest import GatewayProcess
from tests.live.events import checked, parsed
from tests.live.test_cancellation import eventually, leave_after, request_bytes

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


@pytest.mark.parametrize("count", [300, pytest.param(5_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_the_sum_of_outcomes_is_what_was_sent(gateway: GatewayProcess, count: int) -> None:
    chance = random.Random(count)
    outcomes = sorted({outcome for outcome, _ in SCRIPTS})
    before = {outcome: counted(gateway, outcome) for outcome in outcomes}
    ledger: Counter[str] = Counter()
    work = iter([chance.choice(SCRIPTS) for _ in range(count)])

    async def client(session: httpx.AsyncClient) -> None:
        for outcome, words in work:
            await one(gateway, session, outcome, words)
            ledger[outcome] += 1

    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as session:
        await asyncio.gather(*(client(session) for _ in range(16)))

    def agree() -> bool:
        return all(counted(gateway, outcome) - before[outcome] == ledger[outcome] for outcome in outcomes)

    await asyncio.to_thread(eventually, agree, 15.0)
    assert sum(ledger.values()) == count
    assert gateway.metric("active_streams") == 0


async def one(gateway: GatewayProcess, session: httpx.AsyncClient, outcome: str, words: dict[str, Any]) -> None:
    body = {"script": json.dumps(words)}
    if outcome == "cancelled":
        await leave_after(gateway, request_bytes(PATH, body), b"id: 2\n")
        return
    if outcome == "client_error":
        assert (await session.post(PATH, json={"scrypt": ""})).status_code == 422
        return
    answer = await session.post(PATH, json=body)
    if answer.status_code == 200:
        checked(parsed(answer.text))


def counted(gateway: GatewayProcess, outcome: str) -> float:
    return gateway.metric("requests_total", pipeline="scripted_stream", transport="stream", outcome=outcome)
