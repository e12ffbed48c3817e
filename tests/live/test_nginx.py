"""A real nginx: before the gateway with its defaults, gzip and the server block of proxies.md; and before Triton.

Its defaults are buffering and HTTP/1.0 to the gateway.
"""

import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.triton.connect import Kind
from tests.conftest import Require
from tests.toolkit.certificates import Authority
from tests.toolkit.events import events_in, lines_of
from tests.toolkit.nginx import GZIP, documented_server, plain_server, running_nginx
from tests.toolkit.processes import GatewayProcess, StartGateway, config_with, free_ports, running_gateway
from tests.toolkit.waiting import eventually

STREAM = "/v1/pipelines/scripted_patient/stream"

PNG = b"\x89PNG\r\n\x1a\n"
ORIGIN = {"Origin": "https://page.example"}
COMPRESSES = GZIP.format(types="application/json text/plain")


def script(**fields: Any) -> dict[str, str]:
    return {"script": json.dumps(fields)}


@pytest.fixture(scope="module")
def behind(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("behind")
    config = config_with(folder, ["scripted_patient", "ocr"])
    settings = {"triton_url": triton.grpc_url, "config": config, "drain_s": "1"}
    settings["cors_origins"] = ORIGIN["Origin"]
    with running_gateway(folder, **settings) as gateway:
        yield gateway


Proxies = dict[str, httpx.Client]


@pytest.fixture(scope="module")
def proxies(behind: GatewayProcess, tmp_path_factory: pytest.TempPathFactory, require: Require) -> Iterator[Proxies]:
    """A client of each server of one nginx; httpx accepts gzip by default. The last server has no gateway."""
    folder, ports = tmp_path_factory.mktemp("nginx"), free_ports(4)
    authority = Authority(folder)
    servers = [
        plain_server(ports[0], behind.url, COMPRESSES),
        documented_server(ports[1], behind.url, authority),
        documented_server(ports[2], f"http://127.0.0.1:{ports[3]}", authority),
    ]
    urls = {"plain": f"http://127.0.0.1:{ports[0]}", "documented": f"https://127.0.0.1:{ports[1]}"}
    urls["without gateway"] = f"https://127.0.0.1:{ports[2]}"
    options: Any = {"timeout": 30, "http2": True, "verify": ssl.create_default_context(cafile=authority.path)}
    with running_nginx(folder, require, ports[0], "\n".join(servers)), ExitStack() as stack:
        yield {name: stack.enter_context(httpx.Client(base_url=url, **options)) for name, url in urls.items()}


@pytest.mark.parametrize(("server", "version"), [("plain", "HTTP/1.1"), ("documented", "HTTP/2")])
def test_events_arrive_as_the_model_sends_them(
    proxies: Proxies, behind: GatewayProcess, server: str, version: str
) -> None:
    with proxies[server].stream("POST", STREAM, json=script(outputs=20, interval_s=0.3)) as answer:
        assert (answer.http_version, answer.status_code) == (version, 200)
        events = events_in(lines_of(answer))
        assert [next(events).name for _ in range(3)] == ["output"] * 3
        assert behind.metric("active_streams") == 1, "nginx buffered the events until the end of the stream"
    eventually(lambda: behind.metric("active_streams") == 0)
    assert "content-encoding" not in answer.headers
    assert "no-transform" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith("text/event-stream")
    with httpx.stream("POST", behind.url + STREAM, json=script()) as direct:
        direct.read()
    assert direct.headers["x-accel-buffering"] == "no", "nginx removes the header"


def test_a_disconnect_from_the_proxy_cancels_the_request(proxies: Proxies, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    body = script(outputs=1000, interval_s=0.05, notice=str(notice))
    with proxies["plain"].stream("POST", STREAM, json=body) as answer:
        next(events_in(lines_of(answer)))
    eventually(lambda: notice.exists() and bool(notice.read_text()))


def test_a_large_body_reaches_the_gateway_which_refuses_one_above_its_limit(proxies: Proxies) -> None:
    answer = proxies["documented"].post("/v1/pipelines/ocr", files={"image": PNG + bytes(6 << 20)})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    answer = proxies["documented"].post("/v1/pipelines/ocr", files={"image": bytes(60 << 20)}, headers=ORIGIN)
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
    assert answer.headers["access-control-allow-origin"] == ORIGIN["Origin"]


def test_errors_of_nginx_itself_can_be_read_by_a_page(proxies: Proxies) -> None:
    too_large = proxies["documented"].post("/v1/pipelines/ocr", headers={"Content-Length": str(65 << 20)})
    no_gateway = proxies["without gateway"].get("/v1/pipelines")
    for answer, status in ((too_large, 413), (no_gateway, 502)):
        assert (answer.status_code, answer.json()["status"]) == (status, status)
        assert answer.json()["code"] == "proxy_error"
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["access-control-allow-origin"] == "*"


REMOTE = """
client_max_body_size 64m;
server {{
  listen 127.0.0.1:{port} ssl http2;
  ssl_certificate "{folder}/server.pem";
  ssl_certificate_key "{folder}/server.key";
  ssl_client_certificate "{folder}/ca.pem";
  ssl_verify_client on;
  location / {{
    if ($http_authorization !~ "^Bearer secret-[0-9]$") {{ return 401; }}
    grpc_pass grpc://{triton};
  }}
}}
"""


@pytest.fixture(scope="module")
def remote(
    triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory, require: Require
) -> Iterator[tuple[str, Authority]]:
    """The address of the session's Triton behind nginx, which requires a client certificate and a token."""
    folder, (port,) = tmp_path_factory.mktemp("remote"), free_ports(1)
    server = (authority := Authority(folder)).issue("localhost")
    server.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    server.private_key_pem.write_to_path(str(folder / "server.key"))
    with running_nginx(folder, require, port, REMOTE.format(folder=folder, port=port, triton=triton.grpc_url)):
        yield f"localhost:{port}", authority


@pytest.mark.parametrize("kind", ["asyncio", pytest.param("grpcio", marks=pytest.mark.full)])
def test_triton_behind_nginx_gets_calls_streams_and_a_changed_token(
    remote: tuple[str, Authority], kind: Kind, start_gateway: StartGateway
) -> None:
    address, authority = remote
    token, tls = authority.folder / "token", authority.files("gateway.example")
    token.write_text("secret-1\n")
    gateway = start_gateway(
        triton_url=address,
        grpc=kind,
        config=config_with(authority.folder, ["embed", "write"]),
        triton_ca=str(tls.authorities),
        triton_cert=str(tls.certificate),
        triton_key=str(tls.key),
        triton_token_file=str(token),
    )
    assert httpx.post(f"{gateway.url}/v1/pipelines/embed", json={"text": "A cat."}).status_code == 200
    body = {"prompt": "The for statement", "max_tokens": 8}
    assert "event: done" in httpx.post(f"{gateway.url}/v1/pipelines/write/stream", json=body).text
    token.write_text("wrong-1\n")
    message = "Triton refuses the gateway: the token in GATEWAY_TRITON_TOKEN_FILE is missing, wrong or has expired"
    eventually(lambda: message in gateway.log)
    token.write_text("secret-2\n")
    eventually(lambda: httpx.get(f"{gateway.url}/health/ready").status_code == 200)
    assert httpx.post(f"{gateway.url}/v1/pipelines/embed", json={"text": "A cat."}).status_code == 200
    assert gateway.log.count(message) == 1
    assert "secret-" not in gateway.log
    assert "wrong-1" not in gateway.log
