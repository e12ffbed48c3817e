"""Sessions of two gateways with one Triton, behind a real nginx as documented."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.live.conftest import GatewayProcess, free_ports
from tests.live.sessions import sessions_gateway, sessions_triton
from tests.toolkit.certificates import Authority
from tests.toolkit.nginx import documented_affinity, documented_server, running_nginx

PIPELINE = "text_oldest"
PIPELINES = {PIPELINE: {"model": PIPELINE, "session": True}}
READ_TIMEOUT_S = 1
ONE_EACH = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with sessions_triton(tmp_path_factory.mktemp("sessions"), models_venv, PIPELINES) as server:
        yield server


@pytest.fixture(scope="module")
def pinging(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose pings come more often than nginx's timeout."""
    folder = tmp_path_factory.mktemp("pinging")
    with sessions_gateway(triton, folder, PIPELINES, ping_s="0.2") as process:
        yield process


@pytest.fixture(scope="module")
def silent(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose pings come less often than nginx's timeout."""
    folder = tmp_path_factory.mktemp("silent")
    with sessions_gateway(triton, folder, PIPELINES, ping_s="30") as process:
        yield process


@dataclass(frozen=True)
class Proxies:
    """The addresses of one nginx: with one gateway behind it, and with both."""

    pinging: str
    silent: str
    both: str
    tls: ssl.SSLContext


@pytest.fixture(scope="module")
def proxies(
    pinging: GatewayProcess, silent: GatewayProcess, tmp_path_factory: pytest.TempPathFactory, require: Require
) -> Iterator[Proxies]:
    folder, ports = tmp_path_factory.mktemp("nginx"), free_ports(3)
    authority = Authority(folder)
    servers = "\n".join(
        documented_server(port, gateway.url, authority, f"{READ_TIMEOUT_S}s")
        for port, gateway in zip(ports[:2], (pinging, silent), strict=True)
    )
    affinity = documented_affinity(ports[2], *[urlsplit(gateway.url).netloc for gateway in (pinging, silent)])
    with running_nginx(folder, require, ports[0], servers + affinity):
        tls = ssl.create_default_context(cafile=authority.path)
        yield Proxies(*[f"https://127.0.0.1:{port}" for port in ports[:2]], f"http://127.0.0.1:{ports[2]}", tls)


def test_every_step_of_a_client_reaches_its_gateway(
    proxies: Proxies, pinging: GatewayProcess, silent: GatewayProcess
) -> None:
    """Clients have different addresses, and each makes a connection for each request."""
    sessions = []
    for number in range(1, 33):
        transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}", limits=ONE_EACH)
        client = httpx.Client(base_url=proxies.both, transport=transport, timeout=60)
        sessions.append((client, client.post(f"/v1/pipelines/{PIPELINE}/sessions").headers["Location"]))
    assert min(gateway.metric("open_sessions") for gateway in (pinging, silent)) > 0
    for number in range(1, 4):
        answers = [client.post(url, json={"NUMBER": 2}) for client, url in sessions]
        assert [(each.status_code, each.json()["SUM"]) for each in answers] == [(200, 2 * number)] * len(sessions)
    for client, url in sessions:
        assert client.delete(url).status_code == 204
        client.close()
