"""The container's variables and files, read back by the programs that get them: the gateway, its TLS clients, Redis."""

import base64
import os
import shutil
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from redis import Redis

from app import __version__
from app.core.errors import UpstreamUnavailable
from app.observability.otlp import OtlpTracer
from app.pipelines.file import read_gateway_file
from app.process.serving import open_store
from app.settings import Settings, read_settings
from tests.conftest import Require
from tests.helm.rendering import (
    CHART,
    CI_FILES,
    ROOT,
    Document,
    combinations,
    environment_of,
    gateway_container,
    of_kind,
    pod_spec,
    render,
    the,
    triton_container,
)
from tests.toolkit.certificates import Authority
from tests.toolkit.http_server import answering
from tests.toolkit.processes import free_ports
from tests.toolkit.programs import listens, running_program


def settings_of(documents: list[Document]) -> Settings:
    return read_settings(environment_of(gateway_container(documents)), {})


@pytest.mark.parametrize(("values", "kubernetes"), combinations(), ids=str)
def test_every_configuration_is_read_by_the_gateway(values: Path, kubernetes: str) -> None:
    settings = settings_of(render(values, kubernetes=kubernetes))
    assert (settings.port, settings.admin_port) == (8080, 8081)
    assert not settings.embedded


EXTERNAL = {"grpcUrl": "triton.inference.svc:8001", "metricsUrl": "http://triton.inference.svc:8002/metrics"}
SEVERAL = "triton-0.triton:8001,triton-1.triton:8001"
SYSTEM_TLS = {"grpcUrl": "triton:8001", "tls": {"enabled": True}}


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (
            {"gateway": {"workers": 3, "timeoutSeconds": 2.5, "maxBodyBytes": 67_108_864}},
            {"workers": 3, "timeout_s": 2.5, "max_body_bytes": 67_108_864},
        ),
        (
            {"gateway": {"corsOrigins": ["https://a.example", "https://b.example"]}},
            {"cors_origins": ("https://a.example", "https://b.example")},
        ),
        (
            {"gateway": {"imageHosts": ["images.example", "http://files.example:9000"]}},
            {"image_hosts": ("https://images.example", "http://files.example:9000")},
        ),
        ({"gateway": {"docs": False, "console": False}}, {"docs": False, "console": False}),
        (
            {"gateway": {"logLevel": "warning", "logFormat": "text", "logTensors": "shapes"}},
            {"log_level": "warning", "log_format": "text", "log_tensors": "shapes"},
        ),
        ({"gateway": {"tokenizers": "/tokenizers"}}, {"tokenizers": Path("/tokenizers")}),
        ({}, {"triton_repair": True, "traces_url": None, "api_keys_file": None}),
        ({"config": {"source": "models"}}, {"config": None}),
        ({"triton": {"repair": False}}, {"triton_repair": False}),
        (
            {"triton": {"enabled": False, "external": EXTERNAL}},
            {
                "triton_repair": False,
                "triton_url": EXTERNAL["grpcUrl"],
                "triton_metrics_url": EXTERNAL["metricsUrl"],
            },
        ),
        ({"triton": {"enabled": False, "external": {"grpcUrl": SEVERAL}}}, {"triton_url": SEVERAL}),
        (
            {"triton": {"enabled": False, "external": SYSTEM_TLS}},
            {"triton_ca": "system", "triton_cert": None, "triton_token_file": None},
        ),
    ],
    ids=str,
)
def test_a_value_becomes_a_setting(values: Document, settings: dict[str, Any]) -> None:
    found = settings_of(render(values))
    assert {name: getattr(found, name) for name in settings} == settings


def test_the_chart_and_the_gateway_agree_on_defaults() -> None:
    """Except for the values that a container needs."""
    own, charts = Settings(), settings_of(render())
    differing = {name for name in Settings.model_fields if getattr(own, name) != getattr(charts, name)}
    shutdown = {"shutdown_delay_s", "drain_s"}
    assert differing == {"host", "triton_metrics_url", "triton_repair", "config", "log_format"} | shutdown


def test_an_unknown_variable_is_rejected_by_the_gateway() -> None:
    documents = render({"gateway": {"env": [{"name": "GATEWAY_DRAIN", "value": "5"}]}})
    with pytest.raises(Exception, match="did you mean GATEWAY_DRAIN_S"):
        settings_of(documents)


@pytest.mark.parametrize(
    "values", [path for path in CI_FILES if "inline" in path.read_text()], ids=lambda path: path.stem
)
def test_the_gateway_can_read_the_config_map(values: Path, tmp_path: Path) -> None:
    """Writes the files like the volume does."""
    documents = render(values)
    (volume,) = (each for each in pod_spec(documents)["volumes"] if each["name"] == "config")
    name = volume["configMap"]["name"]
    (config_map,) = (each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"] == name)
    for item in volume["configMap"]["items"]:
        target = tmp_path / item["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        if item["key"] in config_map["data"]:
            target.write_text(config_map["data"][item["key"]])
        else:
            target.write_bytes(base64.b64decode(config_map["binaryData"][item["key"]], validate=True))
    assert settings_of(documents).config == Path("/etc/triton-gateway/gateway.yaml")
    file = read_gateway_file(tmp_path / "gateway.yaml")
    wanted = yaml.safe_load(yaml.safe_load(values.read_text())["config"]["gatewayYaml"])["pipelines"]
    assert set(file.spec.pipelines) == set(wanted)
    for pipeline in wanted.values():
        for name in pipeline.get("sample", {}).values():
            assert (tmp_path / name).is_file()


def test_any_text_is_unchanged_in_the_config_map() -> None:
    awkward = "  begins with blanks\n\n# no comment\n{{ .Values.x }}: 'quotes\"\n\ttab\n---\n\n"
    documents = render({"config": {"source": "inline", "gatewayYaml": awkward, "files": {"a/b.txt": awkward}}})
    assert the(documents, "ConfigMap")["data"] == {"gateway.yaml": awkward, "a__b.txt": awkward}


def test_the_reference_pipelines_are_those_of_the_image() -> None:
    """The Dockerfile copies gateway.yaml and the files of its samples to the folder that the chart uses."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert settings_of(render()).config == Path("/app/gateway.yaml")
    assert "WORKDIR /app\nCOPY gateway.yaml .\nCOPY samples samples\n" in dockerfile


CERTIFICATE = [{"key": name, "path": name} for name in ("ca.crt", "tls.crt", "tls.key")]


def mounted_files(documents: list[Document]) -> dict[str, Document]:
    """Returns the Secret, the key and the mode of each mounted file, by path in the gateway's container.

    Without a list of items, a volume has all keys of its Secret: those of a certificate are standard.
    """
    volumes = {each["name"]: each["secret"] for each in pod_spec(documents)["volumes"] if "secret" in each}
    mounts = [each for each in gateway_container(documents)["volumeMounts"] if each["name"] in volumes]
    assert all(each["readOnly"] and "subPath" not in each for each in mounts)
    return {
        f"{mount['mountPath']}/{item['path']}": {
            "secret": volumes[mount["name"]]["secretName"],
            "key": item["key"],
            "mode": volumes[mount["name"]]["defaultMode"],
        }
        for mount in mounts
        for item in volumes[mount["name"]].get("items", CERTIFICATE)
    }


def test_api_keys_are_mounted_without_sub_path() -> None:
    documents = render({"gateway": {"apiKeys": {"secretName": "callers", "secretKey": "file"}}})
    path = settings_of(documents).api_keys_file
    assert mounted_files(documents) == {str(path): {"secret": "callers", "key": "file", "mode": 0o440}}
    assert "callers" not in str(triton_container(documents))


def test_tls_and_token_to_an_external_triton() -> None:
    external = {
        "grpcUrl": "triton:8001",
        "tls": {"enabled": True, "secretName": "pki", "clientCertificate": True},
        "token": {"secretName": "tokens", "secretKey": "triton"},
    }
    documents = render({"triton": {"enabled": False, "external": external}})
    settings, files = settings_of(documents), mounted_files(documents)
    found = [
        files[str(path)]
        for path in (settings.triton_ca, settings.triton_cert, settings.triton_key, settings.triton_token_file)
    ]
    assert [(each["secret"], each["key"]) for each in found] == [
        ("pki", "ca.crt"),
        ("pki", "tls.crt"),
        ("pki", "tls.key"),
        ("tokens", "triton"),
    ]
    assert len(files) == 4


@pytest.mark.parametrize("endpoint", ["http://collector:4318", "https://collector/otlp/"])
def test_both_containers_send_spans_to_the_same_collector(endpoint: str) -> None:
    documents = render({"tracing": {"otlpEndpoint": endpoint}})
    traces_url = settings_of(documents).traces_url
    assert f"--trace-config=opentelemetry,url={traces_url}" in triton_container(documents)["args"]
    assert "--trace-config=mode=opentelemetry" in triton_container(documents)["args"]


@pytest.mark.parametrize(
    ("explain", "keys", "receives", "traces", "collector"),
    [
        ("none", "keys", True, False, ""),
        ("keys", "keys", True, True, ""),
        ("keys", "", False, False, ""),
        ("everyone", "", True, True, ""),
        ("everyone", "", True, True, "http://collector:4318"),
    ],
)
def test_explained_requests_get_the_spans_of_the_sidecar(
    explain: str, keys: str, receives: bool, traces: bool, collector: str
) -> None:
    """The gateway forwards them to a collector."""
    values = {"tracing": {"explain": explain, "otlpEndpoint": collector}, "gateway": {"apiKeys": {"secretName": keys}}}
    settings, arguments = settings_of(render(values)), triton_container(render(values))["args"]
    assert (settings.explain, settings.receives_spans) == (explain == "everyone", receives)
    url = f"--trace-config=opentelemetry,url=http://127.0.0.1:{settings.admin_port}/v1/traces"
    assert [each for each in arguments if "url=" in each] == [url] * traces
    assert settings.traces_url == (f"{collector}/v1/traces" if collector else None)


def test_the_chart_has_the_version_of_the_gateway() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


CA = "/etc/private-ca/ca.crt"


@contextmanager
def only_variables(authority: Path | None) -> Iterator[None]:
    """This process has the container's variables for the authority, or none. TLS clients read them when they start."""
    said = environment_of(gateway_container(render({"privateCa": {"configMapName": "bundle"}})))
    named = {name: str(authority) for name, value in said.items() if value == CA}
    assert named.keys() == {"SSL_CERT_FILE", "OTEL_EXPORTER_OTLP_CERTIFICATE"}
    with patch.dict(os.environ, named if authority else {}, clear=True):
        yield


async def test_redis_with_a_certificate_of_the_authority_is_trusted(tmp_path: Path, require: Require) -> None:
    """With a real Redis that accepts only TLS connections."""
    require(shutil.which("redis-server"), "there is no redis-server: `make system-packages` installs it")
    (port,), authority = free_ports(1), Authority(tmp_path)
    issued = authority.issue("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "server.pem"))
    tls = {"port": port, "cert-file": "server.pem", "key-file": "server.key", "auth-clients": "no"}
    options = [word for name, value in tls.items() for word in (f"--tls-{name}", str(value))]
    command = ["redis-server", "--port", "0", "--save", "", *options]

    async def use_store() -> None:
        async with open_store(Settings(redis_url=f"rediss://localhost:{port}/0")) as store:
            await store.require_room("")

    with running_program(command, tmp_path / "log", lambda: listens(port), cwd=tmp_path):
        with only_variables(None), pytest.raises(UpstreamUnavailable) as refused:
            await use_store()
        assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)
        with only_variables(authority.path):
            await use_store()


async def test_a_collector_with_a_certificate_of_the_authority_gets_spans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, paths = Authority(tmp_path), list[str]()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue("localhost").configure_cert(context)

    def answer(request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str, bytes]:
        paths.append(request.path)
        return 200, "application/x-protobuf", b""

    with answering(answer, context) as port:
        for trusted, received in ((None, []), (authority.path, ["/v1/traces"])):
            with only_variables(trusted):
                tracer = OtlpTracer(f"https://localhost:{port}/v1/traces", "0")
                tracer.start("test", "SERVER", None).end({})
                await tracer.close()
            assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
            assert paths == received


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
