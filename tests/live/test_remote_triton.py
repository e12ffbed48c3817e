"""The real Triton behind nginx, which requires a client certificate and a token, like a Triton on another machine."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from app.triton.connect import Kind
from tests.conftest import Require
from tests.toolkit.certificates import Authority
from tests.toolkit.nginx import running_nginx
from tests.toolkit.processes import StartGateway, free_ports
from tests.toolkit.waiting import eventually

SERVER = """
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
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def remote(triton: EmbeddedTriton, authority: Authority, require: Require) -> Iterator[str]:
    """Starts the proxy and yields its address."""
    folder, (port,) = authority.folder, free_ports(1)
    server = authority.issue("localhost")
    server.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    server.private_key_pem.write_to_path(str(folder / "server.key"))
    with running_nginx(folder, require, port, SERVER.format(folder=folder, port=port, triton=triton.grpc_url)):
        yield f"localhost:{port}"


@pytest.fixture(scope="module")
def config(authority: Authority, pytestconfig: pytest.Config) -> Path:
    """Two of the reference pipelines, for a faster start."""
    reference = yaml.safe_load((pytestconfig.rootpath / "gateway.yaml").read_text())["pipelines"]
    path = authority.folder / "gateway.yaml"
    path.write_text(
        yaml.safe_dump({"pipelines": {name: reference[name] | {"openai": None} for name in ("embed", "write")}})
    )
    return path


@pytest.mark.parametrize("kind", ["asyncio", pytest.param("grpcio", marks=pytest.mark.full)])
def test_calls_streams_and_a_changed_token(
    remote: str, kind: Kind, authority: Authority, config: Path, start_gateway: StartGateway
) -> None:
    token, tls = authority.folder / "token", authority.files("gateway.example")
    token.write_text("secret-1\n")
    gateway = start_gateway(
        triton_url=remote,
        grpc=kind,
        config=str(config),
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
