"""Overload of the real Triton: the gateway never sends refused requests, and releases every slot."""

import asyncio
import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.toolkit.processes import GatewayProcess

REQUESTS = 60
SLEEP_S = 0.2
"""The model has two instances, so it answers ten requests a second."""
WARM_UP = 24
"""After this number of requests, earlier tests do not affect the gateway's estimate of the latency of a request."""


def script(**fields: Any) -> dict[str, str]:
    return {"script": json.dumps({"text": "a", "numbers": [1.0], **fields})}


async def metrics_page(gateway: GatewayProcess) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{gateway.admin_url}/metrics")).text


async def test_requests_that_would_time_out_are_refused_and_not_sent(gateway: GatewayProcess, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(seconds: float) -> httpx.Response:
            body = script(sleep_s=SLEEP_S, journal=str(journal), token=uuid.uuid4().hex)
            headers = {"X-Request-Timeout": str(seconds)}
            return await client.post("/v1/pipelines/scripted", json=body, headers=headers)

        await asyncio.gather(*(ask(10) for _ in range(WARM_UP)))
        journal.write_text("")
        answers = await asyncio.gather(*(ask(3) for _ in range(REQUESTS)))
        statuses = Counter(answer.status_code for answer in answers)
        refused = [answer for answer in answers if answer.status_code == 429]
        received = [line for line in journal.read_text().splitlines() if line.endswith("received")]
        assert set(statuses) <= {200, 429, 504}
        assert statuses[200] >= 3
        assert len(refused) >= 10
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert len(received) <= REQUESTS - len(refused), "a refused request reached the model"
        queued_ms = [float(answer.headers["server-timing"].split("queue;dur=")[1].split(",")[0]) for answer in answers]
        assert max(queued_ms) > 1000 * SLEEP_S
        assert (await ask(5)).status_code == 200
    metrics = await metrics_page(gateway)
    assert "\ntriton_gateway_requests_running 0.0\n" in metrics
    assert "\ntriton_gateway_requests_waiting 0.0\n" in metrics
    assert 'triton_gateway_in_flight_limit{model="scripted"}' in metrics
