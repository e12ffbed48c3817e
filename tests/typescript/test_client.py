"""``samples/client.ts`` compiles in strict mode, and does in Node what its comments say."""

import base64
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.live.openapi_document import ROOT
from tests.toolkit.http_server import answering
from tests.toolkit.processes import GatewayProcess, configured_gateway
from tests.toolkit.proxy import DroppingNetwork, network_to
from tests.toolkit.waiting import eventually
from tests.typescript.building import built_client, call

pytestmark = pytest.mark.timeout(400)

BLANK = "data:image/png;base64," + base64.b64encode((ROOT / "samples" / "blank.png").read_bytes()).decode()
PIPELINES = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]


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
