"""Each kind of invalid input gets a problem object, and the next request works."""

import base64
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.live.conftest import GatewayProcess

JSON = {"Content-Type": "application/json"}
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def next_request_works(client: httpx.Client) -> Iterator[None]:
    yield
    answer = client.post("/v1/pipelines/scripted", json={"script": "{}"})
    assert answer.json() == {"text": "hello", "numbers": [1.0, 2.0]}


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, object]:
    """Checks the required members of the problem object and returns it."""
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, object] = answer.json()
    assert (answer.status_code, found["status"], found["code"]) == (status, status, code)
    assert found["type"] == f"/docs/errors/{code}"
    assert found["request_id"] == answer.headers["x-request-id"]
    assert len(answer.content) <= 4096
    return found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"script": NaN}',
        b"\xff\xfe{",
        b'\xef\xbb\xbf{"script": "{}"}',
        b'{"script": "\\ud800"}',
        b'{"script": "\xff"}',
        '{"script": "x"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"script": ' + b"[" * 100_000,
        b'{"script": "x"} trailing',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_invalid_json_is_400(client: httpx.Client, body: bytes) -> None:
    problem(client.post("/v1/pipelines/scripted", content=body, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"text"'])
def test_json_that_is_not_an_object_is_400(client: httpx.Client, body: bytes) -> None:
    problem(client.post("/v1/pipelines/scripted", content=body, headers=JSON), 400, "invalid_request")


@pytest.mark.parametrize(
    ("pipeline", "body", "field"),
    [
        ("write", {}, "prompt"),
        ("write", {"prompt": 5}, "prompt"),
        ("write", {"prompt": ["a", "b"]}, "prompt"),
        ("write", {"prompt": None}, "prompt"),
        ("write", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("write", {"prompt": "x", "max_tokens": True}, "max_tokens"),
        ("write", {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ("write", {"prompt": "x", "max_tokens": 10**400}, "max_tokens"),
        ("write", {"prompt": "x", "temperature": 2.5}, "temperature"),
        ("write", {"prompt": "x", "seed": 1.5}, "seed"),
        ("write", {"prompt": "x", "tokens": 5}, "tokens"),
        ("write", {"prompt": "x", "early_exit": "y"}, "early_exit"),
        ("ocr", {"image": "*not base64*"}, "image"),
        ("ocr", {"image": base64.b64encode(b"no image at all").decode()}, "image"),
        ("ocr", {"image": "data:image/png;base64"}, "image"),
    ],
)
def test_the_problem_names_the_invalid_field(
    client: httpx.Client, pipeline: str, body: dict[str, object], field: str
) -> None:
    found = problem(
        client.post(f"/v1/pipelines/{pipeline}", content=json.dumps(body), headers=JSON), 422, "invalid_input"
    )
    assert [error["field"] for error in found["errors"]] == [field]  # type: ignore[attr-defined]


def test_the_problem_names_at_most_eight_invalid_fields(client: httpx.Client) -> None:
    body = {"prompt": 1, "max_tokens": 0} | {f"field_{index}": 0 for index in range(1000)}
    found = problem(client.post("/v1/pipelines/write", json=body), 422, "invalid_input")
    assert len(found["errors"]) == 8  # type: ignore[arg-type]


def test_the_input_is_not_echoed(client: httpx.Client) -> None:
    answer = client.post("/v1/pipelines/write", json={"prompt": ["sesame", "sesame"], "seed": "sesame"})
    assert "sesame" not in answer.text


def test_an_unknown_pipeline_is_404_with_the_nearest_name(client: httpx.Client) -> None:
    found = problem(client.post("/v1/pipelines/orc", json={}), 404, "unknown_pipeline")
    assert "'ocr'" in str(found["detail"])


def test_an_unknown_path_is_404_and_a_wrong_method_is_405(client: httpx.Client) -> None:
    problem(client.get("/v1/nothing"), 404, "not_found")
    problem(client.delete("/v1/pipelines/ocr"), 405, "method_not_allowed")


def test_curl_without_a_content_type_gets_a_hint(client: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    found = problem(
        client.post("/v1/pipelines/write", content=b'{"prompt": "x"}', headers=form), 415, "unsupported_media_type"
    )
    assert "-H 'Content-Type: application/json'" in str(found["hint"])


def test_multipart_with_2000_parts_is_400(client: httpx.Client) -> None:
    parts = [("image", (f"{index}.png", b"x")) for index in range(2000)]
    problem(client.post("/v1/pipelines/ocr", files=parts), 400, "invalid_request")


def test_multipart_without_a_boundary_is_400(client: httpx.Client) -> None:
    headers = {"Content-Type": "multipart/form-data"}
    problem(client.post("/v1/pipelines/ocr", content=b"x", headers=headers), 400, "invalid_request")


@pytest.mark.parametrize("timeout", ["nan", "-1", "0", "soon", "inf"])
def test_an_invalid_deadline_is_400(client: httpx.Client, timeout: str) -> None:
    headers = {"X-Request-Timeout": timeout}
    problem(client.post("/v1/pipelines/scripted", json={"script": "{}"}, headers=headers), 400, "invalid_request")


def test_an_invalid_request_id_is_replaced(client: httpx.Client) -> None:
    answer = client.get("/health/live", headers={"X-Request-ID": "a b<script>"})
    assert answer.headers["x-request-id"] != "a b<script>"
    assert client.get("/health/live", headers={"X-Request-ID": "mine-1.2_3"}).headers["x-request-id"] == "mine-1.2_3"


def test_a_body_with_a_too_large_length_is_not_read(gateway: GatewayProcess) -> None:
    head = b"POST /v1/pipelines/ocr HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    head += b"Content-Length: 104857600\r\n\r\n"
    assert b" 413 " in exchange(gateway, head)


def test_a_chunked_body_that_is_too_large_is_cut_off(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(MIB)

    try:
        answer = client.post("/v1/pipelines/ocr", content=chunks(), headers={"Content-Type": "image/png"})
    except httpx.WriteError:
        return
    problem(answer, 413, "payload_too_large")


def test_a_foreign_host_is_refused_on_both_ports(gateway: GatewayProcess) -> None:
    for url in (f"{gateway.url}/v1/pipelines", f"{gateway.admin_url}/metrics"):
        problem(httpx.get(url, headers={"Host": "evil.example"}), 400, "invalid_request")


def test_too_large_headers_are_431(gateway: GatewayProcess) -> None:
    head = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 20_000
    assert b" 431 " in exchange(gateway, head)
    assert b" 431 " in exchange(gateway, head + b"\r\n\r\n")


def test_headers_without_an_end_are_408(gateway: GatewayProcess) -> None:
    answer = exchange(gateway, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n", trickle=b"X-A: b\r\n")
    assert b" 408 " in answer
    assert b"slow_request" in answer


@pytest.mark.parametrize(
    "request_text",
    [
        b"POST /v1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"GET /health/live HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_request_smuggling_is_400(gateway: GatewayProcess, request_text: bytes) -> None:
    assert exchange(gateway, request_text).startswith(b"HTTP/1.1 400 ")


def exchange(gateway: GatewayProcess, request: bytes, trickle: bytes = b"") -> bytes:
    """Sends raw bytes and returns the answer until the gateway closes the connection or is idle.

    Args:
        gateway: the gateway.
        request: the bytes to send.
        trickle: sent again whenever the gateway is idle.
    """
    address = urlsplit(gateway.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request)
        connection.settimeout(0.5 if trickle else 2)
        answer = b""
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            try:
                chunk = connection.recv(65536)
            except TimeoutError:
                if not trickle:
                    return answer
                connection.sendall(trickle)
                continue
            except ConnectionError:
                return answer
            if not chunk:
                return answer
            answer += chunk
        return answer


LARGE = {
    "empty strings": b'{"topics": [' + b'"",' * 2_000_000 + b'""]}',
    "unknown keys": b"{" + b",".join(b'"key%d":1' % index for index in range(500_000)) + b"}",
    "repeated keys": b"{" + b'"text":"",' * 700_000 + b'"text":""}',
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE.keys())
def test_a_large_invalid_body_gets_at_most_eight_errors(client: httpx.Client, body: bytes) -> None:
    found = problem(client.post("/v1/pipelines/insights", content=body, headers=JSON), 422, "invalid_input")
    assert 1 <= len(found["errors"]) <= 8  # type: ignore[arg-type]


def test_a_compressed_body_is_415(client: httpx.Client) -> None:
    answer = client.post("/v1/pipelines/write", content=b"\x1f\x8b\x08", headers=JSON | {"Content-Encoding": "gzip"})
    problem(answer, 415, "unsupported_media_type")
