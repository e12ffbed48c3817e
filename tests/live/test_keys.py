"""API keys over real sockets, with the real Triton, two workers and common clients."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.connections import CONNECTIONS
from tests.toolkit.events import checked, events_in, lines_of
from tests.toolkit.keys import bearer, entry, write_keys
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.raw_http import dialed, post
from tests.toolkit.waiting import eventually

EMBED = "/v1/pipelines/embed"
TEXT = {"text": "A cat."}
SCRIPT = json.dumps({"outputs": 50, "interval_s": 0.1})


@pytest.fixture(scope="module")
def protected(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("protected")
    write_all(folder)
    known = yaml.safe_load(config_path.read_text())["pipelines"]
    pipelines = {name: known[name] | {"sample": None} for name in ("embed", "write", "scripted_patient")}
    (folder / "gateway.yaml").write_text(yaml.safe_dump({"pipelines": pipelines}))
    settings = {"triton_url": triton.grpc_url, "config": str(folder / "gateway.yaml"), "drain_s": "1", "workers": "2"}
    with running_gateway(folder, **settings, api_keys_file=str(folder / "keys.yaml")) as gateway:
        yield gateway


@pytest.fixture
def folder(protected: GatewayProcess) -> Iterator[Path]:
    """The folder of the keys file. The fixture restores the file after the test."""
    yield protected.log_path.parent
    write_all(protected.log_path.parent)
    eventually(lambda: statuses(protected, "all") == {200})


def write_all(folder: Path, *more: dict[str, object]) -> None:
    """Writes the keys ``all`` and ``reads`` and ``more`` keys to the keys file."""
    write_keys(folder / "keys.yaml", entry("all"), entry("reads", pipelines=["embed"]), *more)


def statuses(gateway: GatewayProcess, key_id: str) -> set[int]:
    """Sends requests over several connections, which the kernel distributes over the workers."""
    one_each = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=gateway.url, headers=bearer(key_id), limits=one_each) as client:
        return {client.get("/v1/pipelines").status_code for _ in range(CONNECTIONS)}


def test_each_request_of_a_connection_needs_a_key(protected: GatewayProcess) -> None:
    """Also with an unusual spelling of the path. The gateway answers although a client never sends the body."""
    with httpx.Client(base_url=protected.url) as client:
        found = [
            client.post(EMBED, json=TEXT, headers=headers).status_code
            for headers in (bearer("all"), {}, bearer("reads"), bearer("unknown"), bearer("all"))
        ]
    assert found == [200, 401, 200, 401, 200]
    assert {path: status_of(protected, path, 4_000_000) for path in SPELLINGS} == SPELLINGS


SPELLINGS = {
    EMBED: 401,
    "/v1/pipelines/%65mbed": 401,
    "//v1/pipelines/embed": 404,
    "/v1//pipelines/embed": 404,
    "/health/../v1/pipelines/embed": 404,
    "/v1/pipelines/embed?x=/health/live": 401,
    "http://x/v1/pipelines/embed": 401,
}


def status_of(gateway: GatewayProcess, path: str, size: int) -> int:
    """The status for the head of a POST with an unmodified path. The body of that length is not sent."""
    with dialed(gateway, 5) as connection:
        connection.sendall(post(path, b"", size=size))
        return int(connection.recv(100).split()[1])


def test_a_key_is_rotated_without_ending_its_streams(protected: GatewayProcess, folder: Path) -> None:
    """First both keys are valid, then only the new key. A stream that started with the old key completes."""
    old, new = entry("all")["sha256"], entry("next")["sha256"]
    url = f"{protected.url}/v1/pipelines/scripted_patient/stream"
    with httpx.stream("POST", url, json={"script": SCRIPT}, headers=bearer("all"), timeout=30) as stream:
        lines = lines_of(stream)
        assert stream.status_code == 200
        write_keys(folder / "keys.yaml", entry("all") | {"sha256": [old, new]}, entry("reads"))
        eventually(lambda: statuses(protected, "next") == {200})
        assert statuses(protected, "all") == {200}
        write_keys(folder / "keys.yaml", entry("all") | {"sha256": new}, entry("reads"))
        eventually(lambda: statuses(protected, "all") == {401})
        assert statuses(protected, "next") == {200}
        events = checked(list(events_in(lines)))
    assert [event.name for event in events] == ["output"] * 50 + ["done"]


def test_an_invalid_file_keeps_the_previous_keys(protected: GatewayProcess, folder: Path) -> None:
    message = "the file of API keys has changed but is invalid"
    before = protected.log
    (folder / "keys.yaml").write_text(f"keys:\n  - id: all\n    sha265: {entry('all')['sha256']}\n")
    eventually(lambda: protected.log.count(message, len(before)) == 2)  # once for each worker
    eventually(lambda: protected.metric("config_reload_failed") == 1)
    assert (statuses(protected, "all"), statuses(protected, "unknown")) == ({200}, {401})
    assert "did you mean 'sha256'?" in protected.log
    assert entry("all")["sha256"] not in protected.log
    write_all(folder)
    eventually(lambda: protected.metric("config_reload_failed") == 0)
    assert protected.log.count(message, len(before)) == 2
