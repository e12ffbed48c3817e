"""A client whose connection is cut anywhere repeats its POST with the same key: the model runs once."""

import json
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live.resumable import read_all
from tests.toolkit.processes import LIVE, GatewayProcess, running_gateway, wait_until_ready
from tests.toolkit.raw_http import dialed, post
from tests.toolkit.redis import RedisServer
from tests.toolkit.waiting import eventually

CUTS = {
    "before the request": (0.0, 0.0, 0),
    "in the headers": (0.2, 0.0, 0),
    "in the body": (0.9, 0.0, 0),
    "one byte before the end": (-1, 0.0, 0),
    "at once after the request": (1.0, 0.0, 0),
    "1 ms after the request": (1.0, 0.001, 0),
    "5 ms after the request": (1.0, 0.005, 0),
    "20 ms after the request": (1.0, 0.02, 0),
    "in the answer's head": (1.0, 0.0, 20),
    "after the answer": (1.0, 0.0, 10_000),
}
"""How much of the request is sent, how long the client then waits, and how many bytes of the answer it reads."""
Gateways = list[GatewayProcess]


@pytest.fixture(scope="module")
def over_redis(
    settings: dict[str, str], redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateways]:
    """Two gateways with one Redis: each answer may come from another one."""
    folder = tmp_path_factory.mktemp("pair")
    shared = settings | {"redis_url": redis.url}
    with (
        running_gateway(folder / "first", ready=False, **shared) as first,
        running_gateway(folder / "second", **shared) as second,
    ):
        wait_until_ready(first)
        yield [first, second]


@pytest.fixture(scope="module")
def settings(triton: object) -> dict[str, str]:
    return {"triton_url": triton.grpc_url, "config": str(LIVE / "gateway.yaml"), "drain_s": "1"}  # type: ignore[attr-defined]


@pytest.fixture(params=["memory", "redis"])
def gateways(request: pytest.FixtureRequest, gateway: GatewayProcess) -> Gateways:
    found: Gateways = [gateway, gateway] if request.param == "memory" else request.getfixturevalue("over_redis")
    return found


def body_of(journal: Path) -> bytes:
    script = json.dumps({"outputs": 5, "interval_s": 0.02, "journal": str(journal), "token": "run"})
    return json.dumps({"pipeline": "scripted_kept", "inputs": {"script": script}}).encode()


def send_and_cut(gateway: GatewayProcess, key: str, body: bytes, cut: tuple[float, float, int]) -> None:
    """Sends a part of the request, and resets the connection."""
    part, wait_s, read_bytes = cut
    request = post("/v1/streams", body, f"Idempotency-Key: {key}")
    with dialed(gateway) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.sendall(request[:-1] if part < 0 else request[: int(len(request) * part)])
        time.sleep(wait_s)
        if read_bytes:
            connection.recv(read_bytes)


def repeat(gateway: GatewayProcess, key: str, body: bytes) -> str:
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    answer = httpx.post(f"{gateway.url}/v1/streams", content=body, headers=headers, timeout=30)
    assert answer.status_code == 201, answer.text
    return str(answer.headers["location"])


def runs_in(journal: Path) -> int:
    return journal.read_text().count("run received")


@pytest.mark.parametrize("cut", CUTS)
def test_a_lost_answer_runs_the_model_once(gateways: Gateways, cut: str, tmp_path: Path) -> None:
    key, journal = str(uuid.uuid4()), tmp_path / "journal"
    body = body_of(journal)
    send_and_cut(gateways[0], key, body, CUTS[cut])
    url = repeat(gateways[1], key, body)
    assert repeat(gateways[0], key, body) == url
    assert read_all(gateways[1], url)[-1].data["outputs"] == 5
    assert repeat(gateways[1], key, body) == url
    eventually(lambda: "run answered" in journal.read_text())
    assert runs_in(journal) == 1
