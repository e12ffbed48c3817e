"""A Triton with stateful models, gateways whose pipelines have sessions, and what callers of sessions need.

Each module of tests has a Triton of its own: without ``end_inputs`` a sequence keeps its place for a minute after its
session ended, and a gateway does not know the sequences of another one.
"""

import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from websockets.asyncio.client import ClientConnection

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.session_models import write_models
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton, wait_until_ready
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import events_of


@contextmanager
def sessions_triton(
    folder: Path, models_venv: Path, models: Iterable[str], *, restarts: bool = False
) -> Iterator[EmbeddedTriton]:
    """``restarts``: for tests that kill it."""
    write_models(folder, models)
    with running_triton(EmbeddedOptions(folder, models_venv, first_restart_s=0.2), restarts=restarts) as triton:
        yield triton


@contextmanager
def sessions_gateway(
    triton: EmbeddedTriton, folder: Path, pipelines: Mapping[str, Any], **settings: str
) -> Iterator[GatewayProcess]:
    folder.mkdir(exist_ok=True)
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump({"pipelines": pipelines}))
    with running_gateway(folder / "gateway", triton_url=triton.grpc_url, config=str(config), **settings) as gateway:
        yield gateway


def kill_triton(triton: EmbeddedTriton) -> int:
    """Returns the identifier of the killed process, for ``wait_for_new_triton``."""
    killed = triton.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    return killed


def wait_for_new_triton(gateway: GatewayProcess, triton: EmbeddedTriton, killed: int) -> None:
    """Waits for a Triton other than the process ``killed``.

    The gateway may never be unready: a Triton with small models starts within the two seconds between its questions.
    """
    eventually(lambda: triton.pid not in (None, killed) and answers_ready(triton))
    wait_until_ready(gateway)


def answers_ready(triton: EmbeddedTriton) -> bool:
    try:
        return httpx.get(f"{triton.http_url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def session_client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A client whose sessions have all ended when the block ends."""
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client:
        yield client
    eventually(lambda: gateway.metric("open_sessions") == 0)


@contextmanager
def connections(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A client that makes a connection for each request, which any worker may accept."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S, limits=limits) as client:
        yield client


class OpenedSession:
    """One session, and the sum that its answers must have."""

    def __init__(self, client: httpx.Client, pipeline: str) -> None:
        answer = client.post(f"/v1/pipelines/{pipeline}/sessions")
        assert answer.status_code == 201, answer.text
        self.opened = answer.json()
        self.url = answer.headers["Location"]
        self.client = client
        self.steps = self.sum = 0


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


async def step(client: ClientConnection, number: int, value: int, **fields: Any) -> dict[str, Any]:
    """Sends a step over a WebSocket. Returns its only output."""
    await client.send(json.dumps({"NUMBER": value, **fields}))
    (_, output), (name, done) = await events_of(client, number)
    assert (name, done["outputs"]) == ("done", 1)
    values: dict[str, Any] = output
    return values
