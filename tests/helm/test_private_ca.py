"""One value adds a private certificate authority that all TLS clients of the gateway trust."""

import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.settings import read_settings
from tests.conftest import Require
from tests.fakes.certificates import Authority
from tests.helm.rendering import Document, environment_of, gateway_container, pod_spec, render
from tests.processes import free_ports

START_S = 60.0
CA = "/etc/private-ca/ca.crt"

PING = """
import asyncio, sys
from app.process.serving import open_store
from app.settings import Settings
async def main():
    async with open_store(Settings(redis_url=sys.argv[1])):
        pass
asyncio.run(main())
"""
SPAN = """
import asyncio, sys
from app.observability.otlp import OtlpTracer
from app.observability.tracing import SpanKind
async def main():
    tracer = OtlpTracer(sys.argv[1], "0")
    tracer.start("test", SpanKind.SERVER, None).end({})
    await tracer.close()
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({"configMapName": "bundle"}, {"configMap": {"name": "bundle"}}),
        ({"secretName": "bundle"}, {"secret": {"secretName": "bundle", "defaultMode": 0o440}}),
    ],
    ids=["ConfigMap", "Secret"],
)
def test_the_authority_is_a_file_of_the_gateway(values: Document, source: Document) -> None:
    documents = render({"privateCa": {**values, "key": "root.pem"}})
    (volume,) = (each for each in pod_spec(documents)["volumes"] if each["name"] == "private-ca")
    ((kind, content),) = source.items()
    assert volume[kind] == {**content, "items": [{"key": "root.pem", "path": "ca.crt"}]}
    mount = {"name": "private-ca", "mountPath": "/etc/private-ca", "readOnly": True}
    assert mount in gateway_container(documents)["volumeMounts"]


def test_an_external_triton_uses_the_authority_by_default() -> None:
    external: Document = {"grpcUrl": "triton:8001", "tls": {"enabled": True}}
    values: Document = {"privateCa": {"configMapName": "bundle"}, "triton": {"enabled": False, "external": external}}
    assert read_settings(variables(values), {}).triton_ca == CA
    external["tls"]["secretName"] = "pki"
    assert read_settings(variables(values), {}).triton_ca == "/etc/triton-tls/ca.crt"


def variables(values: Document) -> dict[str, str]:
    return environment_of(gateway_container(render(values)))


def run(script: str, url: str, authority: Path | None) -> subprocess.CompletedProcess[str]:
    """Runs the script with or without the container's variables for the authority."""
    said = variables({"privateCa": {"configMapName": "bundle"}})
    named = {name: str(authority) for name, value in said.items() if value == CA}
    assert named.keys() == {"SSL_CERT_FILE", "OTEL_EXPORTER_OTLP_CERTIFICATE"}
    command = [sys.executable, "-c", script, url]
    return subprocess.run(command, env=named if authority else {}, check=False, capture_output=True, text=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def redis_url(authority: Authority, tmp_path: Path, require: Require) -> Iterator[str]:
    """A real Redis that accepts only TLS connections."""
    require(shutil.which("redis-server"), "there is no redis-server: `make system-packages` installs it")
    (port,) = free_ports(1)
    issued = authority.issue("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "server.pem"))
    tls = {"port": port, "cert-file": "server.pem", "key-file": "server.key", "auth-clients": "no"}
    options = [word for name, value in tls.items() for word in (f"--tls-{name}", str(value))]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["redis-server", "--port", "0", "--save", "", *options], stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        yield f"rediss://localhost:{port}/0"
    finally:
        process.terminate()
        process.wait(START_S)


def test_redis_with_a_certificate_of_the_authority_is_trusted(redis_url: str, authority: Authority) -> None:
    refused = run(PING, redis_url, None)
    assert refused.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
    assert run(PING, redis_url, authority.path).returncode == 0


@contextmanager
def collector(authority: Authority) -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a collector with TLS, and the paths of its requests."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    class Server(HTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that does not trust the certificate closes its connection."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue("localhost").configure_cert(context)
    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://localhost:{server.server_port}/v1/traces", paths
        server.shutdown()


def test_a_collector_with_a_certificate_of_the_authority_gets_spans(authority: Authority) -> None:
    with collector(authority) as (url, paths):
        assert "CERTIFICATE_VERIFY_FAILED" in run(SPAN, url, None).stderr
        assert paths == []
        assert run(SPAN, url, authority.path).returncode == 0
        assert paths == ["/v1/traces"]
