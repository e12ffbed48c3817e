"""``/v1/streams``: streams are started, read, resumed and deleted."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from app.main import create_app
from app.streams.events import ReplayLog
from app.streams.memory_store import MemoryStore
from tests.api.conftest import FINAL, counted, events, word
from tests.toolkit.exchange import connected
from tests.toolkit.gateway import Served

GOOD = {"pipeline": "write", "inputs": {"prompt": "x", "seed": 3}}


async def started(api: Served) -> str:
    """Starts a stream, waits for its end and returns its address."""
    api.engine.answers = [word(b"a", 1), word(b"b", 2), FINAL]
    answer = await api.client.post("/v1/streams", json=GOOD)
    assert answer.status_code == 201
    assert answer.headers["location"] == answer.json()["url"] == f"/v1/streams/{answer.json()['id']}"
    await asyncio.wait_for(api.gateway.inference.workload.idle(), 20)
    return str(answer.headers["location"])


async def test_a_stream_can_be_read_several_times(api: Served) -> None:
    url = await started(api)
    assert api.engine.requests[0].parameters == {"seed": 3}
    for _ in range(2):
        answer = await api.client.get(url)
        assert answer.text.startswith("retry: ")
        assert [name for _, name, _ in events(answer)] == ["output", "output", "done"]
    assert counted(api, "write", "stream") == {"ok": 1}


async def test_a_head_request_is_no_reader_after_its_end(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    url, changes = await started(api), list[int]()
    monkeypatch.setattr(MemoryStore, "read_by", lambda _store, _kept, readers: changes.append(readers))
    answer = await api.client.head(url)
    assert (answer.status_code, answer.content) == (200, b"")
    assert changes == [1, -1]


async def test_a_stream_resumes_after_last_event_id(api: Served) -> None:
    url = await started(api)
    answer = await api.client.get(url, headers={"Last-Event-ID": "2"})
    assert [number for number, _, _ in events(answer)] == [3]


async def test_a_read_after_the_end_is_204(api: Served) -> None:
    url = await started(api)
    assert (await api.client.get(url, headers={"Last-Event-ID": "3"})).status_code == 204


@pytest.mark.parametrize("last", ["4", "-1", "x", "1.0", "\u0661", "9" * 400])
async def test_an_invalid_last_event_id_is_400(api: Served, last: str) -> None:
    url = await started(api)
    answer = await api.client.get(url, headers={"Last-Event-ID": last.encode()})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


async def test_dropped_events_are_410(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "new_log", lambda self: ReplayLog(max_bytes=10))
    url = await started(api)
    answer = await api.client.get(url)
    assert (answer.status_code, answer.json()["code"]) == (410, "stream_evicted")


async def test_a_deleted_stream_is_404(api: Served) -> None:
    url = await started(api)
    assert (await api.client.delete(url)).status_code == 204
    for answer in (await api.client.delete(url), await api.client.get(url)):
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_stream")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b'{"inputs": ' + b"[" * 60_000, 400, "invalid_json"),
        (b"[]", 422, "invalid_input"),
        (b'{"pipeline": "write"}', 422, "invalid_input"),
        (b'{"pipeline": 1, "inputs": {}}', 422, "invalid_input"),
        (b'{"pipeline": write, "inputs": {}}', 400, "invalid_json"),
        (b'{"pipeline": "read", "pipeline": "write", "inputs": {"prompt": "x"}}', 422, "invalid_input"),
        (b'{"pipeline": "write", "inputs": {}, "more": 1}', 422, "invalid_input"),
        (b'{"pipeline": "write", "inputs": {}}', 422, "invalid_input"),
        (b'{"pipeline": "write", "inputs": []}', 400, "invalid_request"),
        (b'{"pipeline": "write", "inputs": {"prompt": "\xff"}}', 400, "invalid_json"),
        (b'{"pipeline": "nobody", "inputs": {}}', 404, "unknown_pipeline"),
        (b'{"pipeline": "read", "inputs": {}}', 400, "invalid_request"),
    ],
)
async def test_invalid_requests_start_no_stream(api: Served, body: bytes, status: int, code: str) -> None:
    answer = await api.client.post("/v1/streams", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert api.engine.requests == []


async def test_an_unsupported_content_type_is_415(api: Served) -> None:
    for media_type in ("", "text/plain", "text/json", "text/plain; x=json", "application/jsonl", "multipart/form-data"):
        answer = await api.client.post("/v1/streams", json=GOOD, headers={"Content-Type": media_type})
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("media_type", ["Application/JSON", "application/json; charset=utf-8", "application/x+json"])
async def test_json_content_types_are_accepted(api: Served, media_type: str) -> None:
    answer = await api.client.post("/v1/streams", json=GOOD, headers={"Content-Type": media_type})
    assert answer.status_code == 201


async def test_without_a_store_the_addresses_are_501(api: Served) -> None:
    gateway = replace(api.gateway, store=None)
    transport = httpx.ASGITransport(connected(create_app(gateway, admin_port=8081)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answers = [await client.request(method, "/v1/streams/x") for method in ("GET", "HEAD", "DELETE")]
        answers.append(await client.post("/v1/streams", json=GOOD))
        assert (await client.post("/v1/pipelines/write/stream", json=GOOD["inputs"])).status_code == 200
        assert (await client.put("/v1/streams/x")).headers["allow"] == "GET, HEAD, DELETE"
    assert {answer.status_code for answer in answers} == {501}
    assert answers[-1].json()["code"] == "resumable_streams_off"
    assert "GATEWAY_REDIS_URL" in answers[-1].json()["hint"]
    assert counted(api, "-", "stream") == {"client_error": 1}
