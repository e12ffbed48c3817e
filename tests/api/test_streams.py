"""``/v1/streams``, the response that sends the events of a stream, its first output, and the tokens in the metrics."""

import asyncio
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import AsyncMock

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sse_starlette import ServerSentEvent
from sse_starlette.sse import AppStatus

from app.api.bodies import Limits
from app.api.streaming import PING, RETRY, Reply, StreamResponse
from app.core.errors import GatewayError, TooManyRequests
from app.routes import create_app
from app.streams.store import MemoryStore
from app.streams.stream import Event, EventName, LiveLog, ReplayLog
from tests.api.conftest import CONFIG, FINAL, counted, events, scripted_fixture, word
from tests.api.openai.conftest import ask
from tests.api.openai.test_texts import CONFIG as LLAMA
from tests.api.openai.test_texts import HELLO, VLLM, complete
from tests.toolkit.exchange import FakeConnection, connected, exchange_with, nothing
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.waiting import until

frame_of = StreamResponse.frame_of
GOOD = {"pipeline": "write", "inputs": {"prompt": "x", "seed": 3}}


async def started(api: Served) -> str:
    """Starts a stream, waits for its end and returns its address."""
    api.engine.answers = [word(b"a", 1), word(b"b", 2), FINAL]
    sent = {"Content-Type": "Application/x+JSON; charset=utf-8"}
    answer = await api.client.post("/v1/streams", json=GOOD, headers=sent)
    assert answer.status_code == 201
    assert answer.headers["location"] == answer.json()["url"] == f"/v1/streams/{answer.json()['id']}"
    await asyncio.wait_for(api.gateway.inference.workload.idle(), 20)
    return str(answer.headers["location"])


async def test_a_stream_can_be_read_several_times_resumed_and_deleted(api: Served) -> None:
    url = await started(api)
    assert api.engine.requests[0].parameters == {"seed": 3}
    for _ in range(2):
        answer = await api.client.get(url)
        assert answer.text.startswith("retry: ")
        assert [name for _, name, _ in events(answer)] == ["output", "output", "done"]
    answer = await api.client.get(url, headers={"Last-Event-ID": "2"})
    assert [number for number, _, _ in events(answer)] == [3]
    assert (await api.client.get(url, headers={"Last-Event-ID": "3"})).status_code == 204
    assert counted(api, "write", "stream") == {"ok": 1}
    assert (await api.client.delete(url)).status_code == 204
    for answer in (await api.client.delete(url), await api.client.get(url)):
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_stream")


async def test_a_head_request_is_no_reader_after_its_end(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    url, changes = await started(api), list[int]()
    monkeypatch.setattr(MemoryStore, "_read_by", lambda _store, _kept, readers: changes.append(readers))
    answer = await api.client.head(url)
    assert (answer.status_code, answer.content) == (200, b"")
    assert changes == [1, -1]


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


async def test_a_stream_that_its_store_refuses_is_rejected_and_frees_its_slot(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.gateway.store, "keep", AsyncMock(side_effect=TooManyRequests("full")))
    assert (await api.client.post("/v1/streams", json=GOOD)).status_code == 429
    assert counted(api, "write", "stream") == {"rejected": 1}
    assert api.gateway.inference.admission.model_queues["writer"].running == 0


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


class Client:
    """The server's side of one ASGI response; the client reads everything or nothing."""

    def __init__(self, *, reads: bool = True, unsent_bytes: int = 0) -> None:
        self.connection = FakeConnection()
        self.connection.unsent_bytes = unsent_bytes if reads else 1
        self.sent: list[dict[str, Any]] = []
        self.reads = reads
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.left: list[GatewayError] = []

    async def send(self, message: Any) -> None:
        if not self.reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        await self.may_send.wait()
        self.sent.append(message)

    async def ask(self, log: LiveLog, limits: Limits) -> None:
        response = StreamResponse(Reply(log, end=self.left.append), limits)
        exchange = exchange_with([("x", "y")], connection=self.connection, send=self.send)
        await response(exchange.scope, nothing, exchange.send)
        assert exchange.header(b"x") is None
        assert exchange.scope["headers"] == []

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_frames_follow_the_standard() -> None:
    assert frame_of(Event(7, "done", b"{}")) == b"id: 7\nevent: done\ndata: {}\n\n"
    assert PING == b": \n\n"
    assert RETRY == b"retry: 1000\n\n"


@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each))
)
def test_a_frame_equals_the_encoding_of_sse_starlette(values: Any) -> None:
    data = orjson.dumps(values)
    for name in get_args(EventName):
        encoded = ServerSentEvent(data.decode(), event=name, id="12", sep="\n").encode()
        assert frame_of(Event(12, name, data)) == encoded


def test_a_signal_does_not_end_streams_through_sse_starlette() -> None:
    assert not AppStatus.enable_automatic_graceful_drain


async def test_all_available_events_are_sent_at_once() -> None:
    log, client = LiveLog(), Client()
    for event in (Event(1, "output", b"{}"), Event(2, "output", b"{}"), Event(3, "done", b"{}")):
        log.append(event)
    await client.ask(log, Limits(1, ping_s=0.05))
    assert [message["more_body"] for message in client.sent[1:]] == [True, True, False]
    frames = [frame_of(Event(number, name, b"{}")) for number, name in ((1, "output"), (2, "output"), (3, "done"))]
    assert client.body == PING + b"".join(frames)
    assert b"connection" not in dict(client.sent[0]["headers"])


async def test_a_slow_client_is_reported_and_then_aborted() -> None:
    log, client = LiveLog(), Client(reads=False)
    log.append(Event(1, "output", b"{}"))
    await client.ask(log, Limits(1, send_s=0.02))
    assert [error.code for error in client.left] == ["slow_consumer", "client_closed_request"]
    assert client.connection.is_aborted


async def test_each_event_restarts_the_ping_timer() -> None:
    log, client = LiveLog(), Client(unsent_bytes=0)
    asking = asyncio.create_task(client.ask(log, Limits(1, ping_s=0.2)))
    for number in range(1, 6):
        await asyncio.sleep(0.05)
        log.append(Event(number, "output", b"{}"))
    await until(lambda: client.body.count(PING) == 2)
    log.append(Event(6, "done", b"{}"))
    await asking
    frames = [frame_of(Event(number, "output", b"{}")) for number in range(1, 6)]
    assert client.body == PING + b"".join(frames) + PING + frame_of(Event(6, "done", b"{}"))
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("unsent_bytes", [0, 1])
async def test_no_ping_is_due_while_an_event_is_being_sent(unsent_bytes: int) -> None:
    log, client = LiveLog(), Client(unsent_bytes=unsent_bytes)
    asking = asyncio.create_task(client.ask(log, Limits(1, ping_s=0.05)))
    await until(lambda: client.body.count(PING) >= 2)
    client.may_send.clear()
    pings = client.body.count(PING)
    log.append(Event(1, "output", b"{}"))
    await asyncio.sleep(0.15)
    log.append(Event(2, "done", b"{}"))
    client.may_send.set()
    await asking
    assert client.body.count(PING) == pings
    assert client.body.endswith(frame_of(Event(1, "output", b"{}")) + frame_of(Event(2, "done", b"{}")))


late = scripted_fixture(CONFIG.replace("{commit_s: 0.05, progress_s: 5}", "{progress_s: 0.05, first_output_s: 300}"))


async def test_the_first_output_may_come_late_in_streams_of_pipelines_and_of_models(late: Served) -> None:
    late.engine.answers = [0.2, word(b"hi", 1), FINAL]
    for path, name in (("/v1/pipelines/write/stream", "prompt"), ("/v2/models/writer/generate_stream", "PROMPT")):
        answer = await late.client.post(path, json={name: "Hi"})
        assert answer.status_code == 200
        assert "hi" in answer.text
        assert "deadline_exceeded" not in answer.text


llama = gateway_fixture(LLAMA, VLLM, answers=HELLO)


async def tokens(llama: Served) -> tuple[float, float, float]:
    """The tokens of prompts, the tokens of answers, and the streams whose time for a token was measured."""
    await asyncio.sleep(0)
    names = ("prompt_tokens_total", "completion_tokens_total", "time_per_output_token_seconds_count")
    registry = llama.gateway.inference.metrics.registry
    first, second, third = (
        registry.get_sample_value(f"triton_gateway_{name}", {"pipeline": "llama"}) or 0 for name in names
    )
    return first, second, third


async def test_whole_answers_and_streams_are_counted(llama: Served) -> None:
    await ask(llama, temperature=9)
    assert await tokens(llama) == (0, 0, 0), "the request was refused"
    await ask(llama)
    assert await tokens(llama) == (7, 3, 0)
    await complete(llama, stream=True)
    assert await tokens(llama) == (14, 6, 1)
    await llama.client.post("/v1/pipelines/llama", json={"prompt": "Hi"})
    assert await tokens(llama) == (21, 9, 1)
    await llama.client.post("/v1/pipelines/llama/stream", json={"prompt": "Hi"})
    assert await tokens(llama) == (28, 12, 2)
    await ask(llama, n=2)
    assert await tokens(llama) == (35, 18, 2)
