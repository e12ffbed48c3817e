"""Sessions of two gateways with one Triton, behind a real nginx as documented."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.live.sessions import sessions_gateway, sessions_triton
from tests.toolkit.nginx import documented_affinity, running_nginx
from tests.toolkit.processes import GatewayProcess, free_ports

PIPELINE = "text_oldest"
PIPELINES = {PIPELINE: {"model": PIPELINE, "session": True}}
ONE_EACH = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with sessions_triton(tmp_path_factory.mktemp("sessions"), models_venv, PIPELINES) as server:
        yield server


def test_every_step_of_a_client_reaches_its_gateway(triton: EmbeddedTriton, tmp_path: Path, require: Require) -> None:
    """Clients have different addresses, and each makes a connection for each request."""
    (port,) = free_ports(1)
    with (
        sessions_gateway(triton, tmp_path / "first", PIPELINES) as first,
        sessions_gateway(triton, tmp_path / "second", PIPELINES) as second,
        running_nginx(tmp_path, require, port, documented_affinity(port, *map(address_of, (first, second)))),
    ):
        sessions = []
        for number in range(1, 33):
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}", limits=ONE_EACH)
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60)
            sessions.append((client, client.post(f"/v1/pipelines/{PIPELINE}/sessions").headers["Location"]))
        assert min(gateway.metric("open_sessions") for gateway in (first, second)) > 0
        for number in range(1, 4):
            answers = [client.post(url, json={"NUMBER": 2}) for client, url in sessions]
            assert [(each.status_code, each.json()["SUM"]) for each in answers] == [(200, 2 * number)] * len(sessions)
        for client, url in sessions:
            assert client.delete(url).status_code == 204
            client.close()


def address_of(gateway: GatewayProcess) -> str:
    return urlsplit(gateway.url).netloc
