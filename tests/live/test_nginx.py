"""Streams through a real nginx with its defaults (buffering, HTTP/1.0 to the gateway) and gzip."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.triton.embedded.server import EmbeddedTriton
from tests.conftest import Require
from tests.live.conftest import GatewayProcess, free_ports, running_gateway
from tests.live.events import checked, events_in, lines_of, parsed
from tests.live.test_cancellation import eventually
from tests.live.test_stream_endings import script

STREAM = "/v1/pipelines/scripted_patient/stream"

CONFIG = """
daemon off;
worker_processes 1;
pid "{folder}/pid";
error_log "{folder}/error.log";
events {{ worker_connections 64; }}
http {{
  access_log off;
  gzip on;
  gzip_proxied any;
  gzip_min_length 1;
  gzip_types application/json text/plain;
  client_body_temp_path "{folder}/body";
  proxy_temp_path "{folder}/proxy";
  fastcgi_temp_path "{folder}/fastcgi";
  uwsgi_temp_path "{folder}/uwsgi";
  scgi_temp_path "{folder}/scgi";
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {upstream}; }}
  }}
}}
"""


@pytest.fixture(scope="module")
def pinging(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    settings = {"triton_url": triton.grpc_url, "config": str(config_path), "ping_s": "0.2", "drain_s": "1"}
    with running_gateway(tmp_path_factory.mktemp("pinging"), **settings) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def proxied(
    pinging: GatewayProcess, tmp_path_factory: pytest.TempPathFactory, require: Require
) -> Iterator[httpx.Client]:
    """A client of nginx in front of the gateway; httpx accepts gzip by default."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")
    require(nginx, "nginx is not installed: `make system-packages` installs it")
    folder, (port,) = tmp_path_factory.mktemp("nginx"), free_ports(1)
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port, upstream=pinging.url))
    command = [str(nginx), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            eventually(lambda: is_live(client))
            yield client
    finally:
        process.terminate()
        process.wait(10)


def is_live(client: httpx.Client) -> bool:
    try:
        return client.get("/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_this_nginx_compresses_other_answers(proxied: httpx.Client) -> None:
    assert proxied.get("/v1/pipelines").headers["content-encoding"] == "gzip"


def test_events_arrive_as_the_model_sends_them(proxied: httpx.Client, pinging: GatewayProcess) -> None:
    with proxied.stream("POST", STREAM, json=script(outputs=100, interval_s=0.3)) as answer:
        events = events_in(lines_of(answer))
        assert [next(events).name for _ in range(3)] == ["output"] * 3
        assert pinging.metric("active_streams") == 1, "nginx buffered the events until the end of the stream"


def test_a_stream_is_not_compressed(proxied: httpx.Client) -> None:
    with proxied.stream("POST", STREAM, json=script(outputs=3, bytes=4000)) as answer:
        checked(list(events_in(lines_of(answer))))
    assert "content-encoding" not in answer.headers
    assert "no-transform" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_the_gateway_sends_the_header_against_buffering(pinging: GatewayProcess) -> None:
    """Sends the request to the gateway directly, because nginx removes the header."""
    with httpx.stream("POST", pinging.url + STREAM, json=script()) as answer:
        answer.read()
    assert answer.headers["x-accel-buffering"] == "no"


def test_pings_pass_while_the_model_is_silent(proxied: httpx.Client) -> None:
    with proxied.stream("POST", STREAM, json=script(outputs=2, interval_s=1.0)) as answer:
        chunks = [(chunk.decode(), time.monotonic()) for chunk in answer.iter_raw()]
    text = "".join(chunk for chunk, _ in chunks)
    assert text.count(": \n\n") >= 2
    first_ping = next(arrived for chunk, arrived in chunks if ": \n\n" in chunk)
    next_event = next(arrived for chunk, arrived in chunks if "id: 2\n" in chunk)
    assert next_event - first_ping > 0.1
    checked(parsed(text))


def test_a_disconnect_from_the_proxy_cancels_the_request(proxied: httpx.Client, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    body = script(outputs=1000, interval_s=0.05, notice=str(notice))
    with proxied.stream("POST", STREAM, json=body) as answer:
        next(events_in(lines_of(answer)))
    eventually(lambda: notice.exists() and bool(notice.read_text()))


def test_a_resumable_stream_resumes_through_the_proxy(proxied: httpx.Client) -> None:
    body = {"pipeline": "scripted_patient", "inputs": script(outputs=6, interval_s=0.05)}
    path = proxied.post("/v1/streams", json=body).headers["location"]
    with proxied.stream("GET", path) as answer:
        stream = events_in(lines_of(answer))
        events = [next(stream), next(stream)]
    with proxied.stream("GET", path, headers={"Last-Event-ID": "2"}) as answer:
        events += events_in(lines_of(answer))
    assert len(checked(events)) == 7
    assert proxied.get(path, headers={"Last-Event-ID": "7"}).status_code == 204
