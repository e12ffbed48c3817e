"""Sessions through a real nginx with the configuration of the documentation, in front of a real Triton."""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from websockets.exceptions import ConnectionClosed

from app.triton.embedded.launch import EmbeddedOptions
from app.triton.embedded.server import EmbeddedTriton
from tests.conftest import Require
from tests.fakes.certificates import Authority
from tests.fakes.websocket_client import opened
from tests.live.conftest import GatewayProcess, free_ports, running_gateway, running_triton
from tests.live.nginx import documented_routes, documented_server, running_nginx
from tests.live.session_models import write_session_model
from tests.live.test_session_sockets import step
from tests.waiting import eventually

PIPELINE = "int64_oldest"
READ_TIMEOUT_S = 1


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    repository = tmp_path_factory.mktemp("sessions")
    write_session_model(repository, PIPELINE)
    with running_triton(EmbeddedOptions(repository, models_venv)) as server:
        yield server


@contextmanager
def sessions_gateway(triton: EmbeddedTriton, folder: Path, **settings: str) -> Iterator[GatewayProcess]:
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump({"pipelines": {PIPELINE: {"model": PIPELINE, "session": True}}}))
    with running_gateway(folder / "gateway", triton_url=triton.grpc_url, config=str(config), **settings) as process:
        yield process


@pytest.fixture(scope="module")
def pinging(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose pings come more often than nginx's timeout."""
    with sessions_gateway(triton, tmp_path_factory.mktemp("pinging"), name="a", ping_s="0.2") as process:
        yield process


@pytest.fixture(scope="module")
def silent(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose pings come less often than nginx's timeout."""
    with sessions_gateway(triton, tmp_path_factory.mktemp("silent"), name="b", ping_s="30") as process:
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
    routes = documented_routes(ports[2], *[urlsplit(gateway.url).netloc for gateway in (pinging, silent)])
    with running_nginx(folder, require, ports[0], servers + routes):
        tls = ssl.create_default_context(cafile=authority.path)
        yield Proxies(*[f"https://127.0.0.1:{port}" for port in ports[:2]], f"http://127.0.0.1:{ports[2]}", tls)


async def test_pings_keep_a_session_over_a_websocket(proxies: Proxies) -> None:
    async with opened(proxies.pinging, PIPELINE, ssl=proxies.tls) as client:
        assert (await step(client, 1, 5))["SUM"] == 5
        await asyncio.sleep(READ_TIMEOUT_S * 1.5)
        assert (await step(client, 2, 6))["SUM"] == 11


async def test_the_timeout_of_nginx_ends_a_silent_session(proxies: Proxies, silent: GatewayProcess) -> None:
    async with opened(proxies.silent, PIPELINE, ssl=proxies.tls) as client:
        assert (await step(client, 1, 5))["SUM"] == 5
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1006
    await asyncio.to_thread(eventually, lambda: silent.metric("open_sessions") == 0)
    assert silent.metric("websockets_total", pipeline=PIPELINE, reason="lost") == 1


def test_every_step_finds_its_gateway_by_the_id(
    proxies: Proxies, pinging: GatewayProcess, silent: GatewayProcess
) -> None:
    """Without the routes, nginx sends requests to both gateways in turn."""
    with httpx.Client(base_url=proxies.both, timeout=60) as client:
        opened = [client.post(f"/v1/pipelines/{PIPELINE}/sessions").headers["Location"] for _ in range(6)]
        assert [gateway.metric("open_sessions") for gateway in (pinging, silent)] == [3, 3]
        for number in range(1, 4):
            answers = [client.post(url, json={"NUMBER": 2}) for url in opened]
            assert [(each.status_code, each.json()["SUM"]) for each in answers] == [(200, 2 * number)] * 6
        assert [client.delete(url).status_code for url in opened] == [204] * 6
    answers = [httpx.delete(gateway.url + url) for url in opened for gateway in (pinging, silent)]
    assert sorted(each.json()["code"] for each in answers) == ["misdirected_session"] * 6 + ["unknown_session"] * 6
