"""Sessions of two gateways with one Triton: behind a real nginx as documented, and with a real Redis."""

import asyncio
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from app.triton.embedded.server import EmbeddedTriton
from tests.conftest import Require
from tests.fakes.certificates import Authority
from tests.fakes.websocket_client import opened
from tests.live.conftest import GatewayProcess, free_ports
from tests.live.nginx import documented_routes, documented_server, running_nginx
from tests.live.redis import RedisServer
from tests.live.session_models import MODELS
from tests.live.sessions import sessions_gateway, sessions_triton, step
from tests.waiting import eventually

PIPELINE, COUNTED, SHORT = "int64_oldest", "uint64_oldest", "short"
PIPELINES = {name: {"model": name, "session": True} for name in (PIPELINE, COUNTED, SHORT)}
PLACES = MODELS[COUNTED].places
READ_TIMEOUT_S = 1


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    with sessions_triton(tmp_path_factory.mktemp("sessions"), models_venv, PIPELINES) as server:
        yield server


@pytest.fixture(scope="module")
def pinging(
    triton: EmbeddedTriton, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway whose pings come more often than nginx's timeout."""
    folder = tmp_path_factory.mktemp("pinging")
    with sessions_gateway(triton, folder, PIPELINES, name="a", ping_s="0.2", redis_url=redis.url) as process:
        yield process


@pytest.fixture(scope="module")
def silent(
    triton: EmbeddedTriton, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway whose pings come less often than nginx's timeout."""
    folder = tmp_path_factory.mktemp("silent")
    with sessions_gateway(triton, folder, PIPELINES, name="b", ping_s="30", redis_url=redis.url) as process:
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


def opening(gateway: GatewayProcess, pipeline: str = COUNTED) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/pipelines/{pipeline}/sessions", timeout=60)


def delete_all(gateway: GatewayProcess, answers: list[httpx.Response]) -> None:
    for each in answers:
        httpx.delete(gateway.url + each.headers["Location"]).raise_for_status()


def has_free_places(gateway: GatewayProcess, number: int) -> bool:
    """Opens all sessions that it can, and ends them again."""
    opened = [answer for _ in range(PLACES) if (answer := opening(gateway)).status_code == 201]
    delete_all(gateway, opened)
    return len(opened) == number


def test_two_gateways_open_no_more_sessions_than_the_model_has(pinging: GatewayProcess, silent: GatewayProcess) -> None:
    gateways = [pinging, silent] * PLACES
    with ThreadPoolExecutor(len(gateways)) as pool:
        answers = list(pool.map(opening, gateways))
    assert Counter(each.status_code for each in answers) == {201: PLACES, 429: PLACES}
    assert sum(gateway.metric("open_sessions", pipeline=COUNTED) for gateway in (pinging, silent)) == PLACES
    for gateway in (pinging, silent):
        own = [each for each, at in zip(answers, gateways, strict=True) if at is gateway and each.status_code == 201]
        delete_all(gateway, own)
    for gateway in (pinging, silent):
        eventually(partial(has_free_places, gateway, PLACES))


def test_another_gateway_says_where_the_session_is(pinging: GatewayProcess, silent: GatewayProcess) -> None:
    url = opening(pinging).headers["Location"]
    here = f"{socket.gethostname()}:{urlsplit(pinging.url).port}"
    eventually(lambda: here in httpx.delete(silent.url + url).json()["detail"])
    answer = httpx.post(silent.url + url, json={"NUMBER": 1})
    assert (answer.status_code, answer.json()["code"]) == (421, "misdirected_session")
    assert httpx.delete(pinging.url + url).status_code == 204


def test_sessions_go_on_while_redis_does_not_answer(
    pinging: GatewayProcess, silent: GatewayProcess, redis: RedisServer
) -> None:
    """New sessions are refused, at first after 2 s and then at once. After the outage the count is right again."""
    url = opening(pinging).headers["Location"]
    assert httpx.post(pinging.url + url, json={"NUMBER": 2}).json()["SUM"] == 2
    redis.freeze()
    try:
        for _ in range(2):
            refused = opening(pinging)
            assert (refused.status_code, refused.json()["code"]) == (503, "upstream_unavailable")
        assert refused.elapsed.total_seconds() < 1.0
        assert httpx.post(pinging.url + url, json={"NUMBER": 3}).json()["SUM"] == 5
    finally:
        redis.thaw()
    redis.flush()
    eventually(lambda: (answer := opening(pinging)).status_code == 201 and not delete_all(pinging, [answer]))
    assert httpx.post(pinging.url + url, json={"NUMBER": 4}).json()["SUM"] == 9
    eventually(partial(has_free_places, silent, PLACES - 1))
    assert httpx.post(pinging.url + url, json={"NUMBER": 1}, headers={"X-Session-End": "true"}).json()["SUM"] == 10


@pytest.mark.full
def test_the_places_of_a_killed_gateway_become_free(
    triton: EmbeddedTriton, redis: RedisServer, pinging: GatewayProcess, tmp_path: Path
) -> None:
    with sessions_gateway(triton, tmp_path, PIPELINES, redis_url=redis.url) as killed:
        url = opening(killed, SHORT).headers["Location"]
        assert httpx.post(killed.url + url, json={"NUMBER": 2}).status_code == 200
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait(60)
    assert opening(pinging, SHORT).status_code == 429
    eventually(lambda: opening(pinging, SHORT).status_code == 201)
