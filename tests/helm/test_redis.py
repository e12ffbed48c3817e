"""The small Redis for trials of resumable streams, and a private authority that the gateway's TLS clients trust."""

import os
import shutil
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest.mock import patch

import pytest
from redis import Redis

from app.core.errors import UpstreamUnavailable
from app.observability.otlp import OtlpTracer
from app.observability.tracing import SpanKind
from app.process.serving import open_store
from app.settings import Settings
from tests.conftest import Require
from tests.helm.rendering import environment_of, gateway_container, of_kind, render
from tests.toolkit.certificates import Authority
from tests.toolkit.http_server import answering
from tests.toolkit.processes import free_ports
from tests.toolkit.programs import listens, running_program

CA = "/etc/private-ca/ca.crt"


@contextmanager
def only_variables(authority: Path | None) -> Iterator[None]:
    """This process has the container's variables for the authority, or none. TLS clients read them when they start."""
    said = environment_of(gateway_container(render({"privateCa": {"configMapName": "bundle"}})))
    named = {name: str(authority) for name, value in said.items() if value == CA}
    assert named.keys() == {"SSL_CERT_FILE", "OTEL_EXPORTER_OTLP_CERTIFICATE"}
    with patch.dict(os.environ, named if authority else {}, clear=True):
        yield


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_redis_with_a_certificate_of_the_authority_is_trusted(
    authority: Authority, tmp_path: Path, require: Require
) -> None:
    """With a real Redis that accepts only TLS connections."""
    require(shutil.which("redis-server"), "there is no redis-server: `make system-packages` installs it")
    (port,) = free_ports(1)
    issued = authority.issue("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "server.pem"))
    tls = {"port": port, "cert-file": "server.pem", "key-file": "server.key", "auth-clients": "no"}
    options = [word for name, value in tls.items() for word in (f"--tls-{name}", str(value))]
    command = ["redis-server", "--port", "0", "--save", "", *options]
    settings = Settings(redis_url=f"rediss://localhost:{port}/0")
    with running_program(command, tmp_path / "log", lambda: listens(port), cwd=tmp_path):
        with only_variables(None), pytest.raises(UpstreamUnavailable) as refused:
            await use_store(settings)
        assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)
        with only_variables(authority.path):
            await use_store(settings)


async def use_store(settings: Settings) -> None:
    async with open_store(settings) as store:
        await store.require_room("")


@contextmanager
def collector(authority: Authority) -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a collector with TLS, and the paths of its requests."""
    paths: list[str] = []

    def answer(request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str, bytes]:
        paths.append(request.path)
        return 200, "application/x-protobuf", b""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue("localhost").configure_cert(context)
    with answering(answer, context) as port:
        yield f"https://localhost:{port}/v1/traces", paths


async def test_a_collector_with_a_certificate_of_the_authority_gets_spans(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with collector(authority) as (url, paths):
        with only_variables(None):
            await send_span(url)
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        assert paths == []
        with only_variables(authority.path):
            await send_span(url)
        assert paths == ["/v1/traces"]


async def send_span(url: str) -> None:
    tracer = OtlpTracer(url, "0")
    tracer.start("test", SpanKind.SERVER, None).end({})
    await tracer.close()


def test_without_the_value_there_is_no_redis() -> None:
    assert "redis" not in str(render()).lower()


def test_a_real_redis_starts_with_its_arguments(tmp_path: Path, require: Require) -> None:
    """With the container's command, on another port and without a writable folder."""
    require(shutil.which("redis-server"), "there is no redis-server: `make system-packages` installs it")
    (port,) = free_ports(1)
    deployments = of_kind(render({"redis": {"enabled": True}}), "Deployment")
    (said,) = next(
        each["spec"]["template"]["spec"]["containers"]
        for each in deployments
        if each["metadata"]["name"] == "demo-triton-gateway-redis"
    )
    assert said["args"][:2] == ["--port", "6379"]
    command = [*said["command"], "--port", str(port), *said["args"][2:]]
    wanted = {"maxmemory": str(128 * 2**20), "maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}
    with (
        running_program(command, tmp_path / "log", lambda: listens(port), cwd=tmp_path),
        Redis(port=port) as redis,
    ):
        assert {name: redis.config_get(name)[name] for name in wanted} == wanted
        assert redis.config_get("protected-mode")["protected-mode"] == "no", "clients of other pods would be refused"
        redis.set("a", "b")
    assert [each.name for each in tmp_path.iterdir()] == ["log"], "the root file system is read-only"
