"""``samples/client.ts`` and the server of docs/how-to/own-server.md do in Node what their comments and pages say.

The client compiles in strict mode. The server stands between a page and a gateway with API keys.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.docs.pages import blocks_of
from tests.live.test_openapi import CHECKED_IN, ROOT
from tests.toolkit.environments import npm_environment, once_in
from tests.toolkit.events import checked, parsed
from tests.toolkit.http_server import answering
from tests.toolkit.keys import entry, key_text
from tests.toolkit.processes import GatewayProcess, configured_gateway, free_ports, live_gateway
from tests.toolkit.programs import output_of
from tests.toolkit.proxy import DroppingNetwork, network_to
from tests.toolkit.waiting import eventually

FILES = Path(__file__).parent / "client"
NO_NETWORK = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "NO_UPDATE_NOTIFIER": "1"}
BLANK = "data:image/png;base64," + base64.b64encode((ROOT / "samples" / "blank.png").read_bytes()).decode()
PIPELINES = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]


def call(folder: Path, *command: str) -> str:
    """Runs an npm program and returns its output."""
    environment = os.environ | NO_NETWORK | {"PATH": f"{folder}/node_modules/.bin:{os.environ['PATH']}"}
    return output_of(command, folder, environment=environment)


def built_client(require: Require) -> Path:
    """Returns a folder with ``calls.mjs`` for Node and ``page.js`` for browsers, compiled in strict mode."""
    return once_in(npm_environment("gateway-client", FILES, require), _compile)


def _compile(folder: Path) -> None:
    for path in (CHECKED_IN, ROOT / "samples" / "client.ts", ROOT / "samples" / "useStream.ts"):
        shutil.copy(path, folder)
    call(folder, "openapi-typescript", "openapi.json", "-o", "api.ts")
    call(folder, "tsc", "--project", "tsconfig.json")
    call(folder, "esbuild", "calls.ts", "--bundle", "--platform=node", "--format=esm", "--outfile=calls.mjs")
    call(folder, "esbuild", "page.tsx", "--bundle", "--jsx=automatic", "--outfile=page.js")


@pytest.fixture(scope="module")
def limited(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that runs two requests at a time and has no queue."""
    folder = tmp_path_factory.mktemp("limited")
    write = {**PIPELINES["write"], "limits": {"in_flight": 2, "queue": 0}}
    (folder / "samples").symlink_to(ROOT / "samples")
    with configured_gateway(triton, folder, {"write": write, "ocr": PIPELINES["ocr"]}) as gateway:
        yield gateway


@pytest.fixture
def answer_of(require: Require) -> Callable[..., Any]:
    """Runs one of the calls in ``client/calls.ts``."""
    client = built_client(require)
    return lambda name, url, *more: json.loads(call(client, "node", "calls.mjs", name, url, *more))


def test_a_file_is_sent_as_json_a_form_or_bytes(answer_of: Callable[..., Any], limited: GatewayProcess) -> None:
    assert answer_of("bodies", limited.url, BLANK) == ["no_text"] * 3


def test_a_problem_has_its_fields_and_the_request_id(answer_of: Callable[..., Any], limited: GatewayProcess) -> None:
    code, errors, has_id = answer_of("problem", limited.url)
    assert (code, has_id) == ("invalid_input", True)
    assert [error["field"] for error in errors] == ["max_tokens"]


def test_refused_requests_are_sent_again(answer_of: Callable[..., Any], limited: GatewayProcess) -> None:
    assert answer_of("crowd", limited.url) == [True] * 6


def test_a_lost_connection_loses_no_output(answer_of: Callable[..., Any], limited: GatewayProcess) -> None:
    whole = httpx.post(
        f"{limited.url}/v1/pipelines/write", json={"prompt": "The for statement", "max_tokens": 12, "temperature": 0}
    ).json()
    port = urlsplit(limited.url).port
    assert port
    with network_to(port, DroppingNetwork) as network:
        tokens, last_id, outputs = answer_of("outputs", network.url)
        assert network.dropped
    assert tokens == whole["token_id"]
    assert (last_id, outputs) == ("13", 12)


def test_an_abort_cancels_the_stream(answer_of: Callable[..., Any], limited: GatewayProcess) -> None:
    assert answer_of("left", limited.url) == [3, "AbortError"]
    eventually(lambda: active_streams(limited) == 0)


def active_streams(gateway: GatewayProcess) -> int:
    return int(httpx.get(f"{gateway.url}/v1/statistics").json()["pipelines"]["write"]["active_streams"])


@pytest.fixture
def forgetful() -> Iterator[tuple[str, list[str]]]:
    """A server that drops the first request for a stream, and answers others like a proxy; and the keys of requests."""
    keys: list[str] = []

    def answer(request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str, bytes]:
        if request.command == "GET":
            output = b'id: 1\nevent: output\ndata: {"token_id": [7]}\n\n'
            done = b'id: 2\nevent: done\ndata: {"reason": "complete", "outputs": 1}\n\n'
            return 200, "text/event-stream", output + done
        if request.path != "/v1/streams":
            return 413, "text/html", b"<h1>Too large</h1>"
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) == 1:
            raise ConnectionError("the answer is lost")
        return 201, "application/json", b'{"id": "s", "url": "/v1/streams/s", "request_id": "r"}'

    with answering(answer) as port:
        yield f"http://127.0.0.1:{port}", keys


def test_a_lost_answer_is_asked_for_with_the_same_key(
    answer_of: Callable[..., Any], forgetful: tuple[str, list[str]]
) -> None:
    url, keys = forgetful
    assert answer_of("outputs", url) == [[7], "2", 1]
    first, second = keys
    assert len(first) > 16
    assert first == second


def test_the_page_of_a_proxy_is_an_error_with_its_status(
    answer_of: Callable[..., Any], forgetful: tuple[str, list[str]]
) -> None:
    assert answer_of("foreign", forgetful[0]) == [413]


INPUTS = {"prompt": "The for statement", "max_tokens": 512, "temperature": 0}
ALICE = {"Cookie": "theme=dark; session=alice"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own-server")


guarded = live_gateway(keys=[entry("everything")])


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
