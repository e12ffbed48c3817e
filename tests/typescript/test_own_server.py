"""The server of docs/how-to/own-server.md, as printed, between a page and a gateway with API keys."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.docs.pages import blocks_of
from tests.live.openapi_document import ROOT
from tests.toolkit.events import checked, parsed
from tests.toolkit.keys import entry, key_text, write_keys
from tests.toolkit.processes import GatewayProcess, free_ports, running_gateway
from tests.toolkit.waiting import eventually

INPUTS = {"prompt": "The for statement", "max_tokens": 512, "temperature": 0}
ALICE = {"Cookie": "theme=dark; session=alice"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own-server")


@pytest.fixture(scope="module")
def guarded(triton: EmbeddedTriton, config_path: Path, folder: Path) -> Iterator[GatewayProcess]:
    keys = write_keys(folder / "keys.yaml", entry("everything"))
    settings = {"triton_url": triton.grpc_url, "config": str(config_path), "api_keys_file": str(keys)}
    with running_gateway(folder / "gateway", **settings) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def own_server(guarded: GatewayProcess, folder: Path, require: Require) -> Iterator[httpx.Client]:
    require(shutil.which("node"), "there is no node")
    (port,) = free_ports(1)
    (text,) = (text for language, text in blocks_of(ROOT / "docs" / "how-to" / "own-server.md") if language == "js")
    (folder / "server.mjs").write_text(text)
    keys = json.dumps({"alice": key_text("everything")})
    settings = {"GATEWAY": guarded.url, "KEYS": keys, "PORT": str(port)}
    process = subprocess.Popen(["node", folder / "server.mjs"], env=os.environ | settings)
    transport = httpx.HTTPTransport(retries=8)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, transport=transport) as client:
            yield client
        assert process.poll() is None, "the server ended"
    finally:
        process.kill()
        process.wait()


def test_only_users_with_a_session_reach_the_pipelines(own_server: httpx.Client) -> None:
    assert own_server.get("/v1/pipelines").status_code == 401
    assert own_server.get("/v1/pipelines", headers={"Cookie": "session=mallory"}).status_code == 401
    assert own_server.get("/v1/../docs", headers=ALICE).status_code == 404
    assert own_server.get("/v1/pipelines", headers=ALICE).status_code == 200


def test_a_stream_is_started_and_resumed(own_server: httpx.Client) -> None:
    body = {"pipeline": "write", "inputs": {**INPUTS, "max_tokens": 5}}
    started = own_server.post("/v1/streams", json=body, headers=ALICE)
    assert started.status_code == 201, started.text
    location = started.headers["Location"]
    assert [event.id for event in checked(parsed(own_server.get(location, headers=ALICE).text))] == [1, 2, 3, 4, 5, 6]
    read = own_server.get(location, headers=ALICE | {"Last-Event-ID": "2"})
    assert read.status_code == 200, read.text
    assert [event.id for event in checked(parsed(read.text), 3)] == [3, 4, 5, 6]


def test_a_problem_keeps_its_status_and_its_body(own_server: httpx.Client) -> None:
    refused = own_server.post("/v1/pipelines/write", json={**INPUTS, "max_tokens": 9999}, headers=ALICE)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input")
    assert refused.headers["X-Request-ID"] == refused.json()["request_id"]


def test_a_page_that_leaves_cancels_the_work(own_server: httpx.Client, guarded: GatewayProcess) -> None:
    body = {"script": json.dumps({"outputs": 600, "interval_s": 0.1})}
    with own_server.stream("POST", "/v1/pipelines/scripted_patient/stream", json=body, headers=ALICE) as answer:
        next(answer.iter_lines())
    eventually(lambda: guarded.metric("requests_total", pipeline="scripted_patient", outcome="cancelled") == 1)
