"""Slots, the queue and 429 over HTTP, in every dialect."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import Mock

import httpx
import pytest

from app.admission.limit import StreamLimit
from app.core.errors import DeadlineExceeded, TooManyRequests, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from tests.api.conftest import FINAL, READ, READER, WRITER, word
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.keys import bearer, entry
from tests.toolkit.models import model, response, tensor
from tests.toolkit.waiting import until

CONFIG = """
pipelines:
  read:
    model: reader
    inputs: {note: {tensor: NOTE, kind: text}, image: {tensor: IMAGE, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    limits: {in_flight: 1, queue: 1}
  write:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    limits: {in_flight: 1, queue: 0}
    stream: {commit_s: 0.05}
    openai: {completions: {}}
  embed:
    model: embedder
    inputs: {text: {tensor: TEXT, kind: text}}
    outputs: {embedding: {tensor: VECTOR}}
    limits: {in_flight: 1, queue: 0}
    openai: {embeddings: {}}
  free:
    model: free
    inputs: {text: {tensor: TEXT, kind: text}}
"""
EMBEDDER = model("TEXT BYTES [1]", "VECTOR FP32 [2]", name="embedder", max_batch_size=2)
FREE = model("TEXT BYTES [1]", "VECTOR FP32 [2]", name="free", instance_count=2, max_batch_size=4, joins_requests=True)
NOTE = {"note": "x", "image": "y"}
V2 = {"inputs": [{"name": name, "datatype": "BYTES", "shape": [1], "data": ["x"]} for name in ("NOTE", "IMAGE")]}
WORDS = {"prompt": "x"}


api = gateway_fixture(CONFIG, READER, WRITER, EMBEDDER, FREE)


def running(api: Served) -> dict[str, int]:
    queues = api.gateway.inference.admission.model_queues
    return {model: queue.running for model, queue in queues.items() if queue.running}


async def metric(api: Served, name: str, **labels: str) -> float | None:
    assert (await api.admin.get("/metrics")).status_code == 200
    return api.gateway.inference.metrics.registry.get_sample_value(f"triton_gateway_{name}", labels)


def post(api: Served, path: str, body: object, **headers: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(api.client.post(path, json=body, headers=headers))


REQUESTS: dict[str, tuple[str, str, object]] = {
    "pipeline": ("reader", "/v1/pipelines/read", NOTE),
    "infer": ("reader", "/v2/models/reader/infer", V2),
    "unary generate": ("reader", "/v2/models/reader/generate", {"NOTE": "x", "IMAGE": "x"}),
    "stream": ("writer", "/v1/pipelines/write/stream", WORDS),
    "resumable stream": ("writer", "/v1/streams", {"pipeline": "write", "inputs": WORDS}),
    "generate stream": ("writer", "/v2/models/writer/generate_stream", {"PROMPT": "x"}),
    "completion": ("writer", "/v1/completions", {"model": "write", "prompt": "x"}),
    "completion stream": ("writer", "/v1/completions", {"model": "write", "prompt": "x", "stream": True}),
    "embeddings": ("embedder", "/v1/embeddings", {"model": "embed", "input": ["a", "b", "c"]}),
}


def scripted(api: Served, model: str, *, pause_s: float) -> None:
    vector = response(tensor("VECTOR", "FP32", [[0.5, 0.5], [0.5, 0.5]]))
    answers = {"reader": [pause_s, READ], "writer": [word(b"a", 1), pause_s, FINAL], "embedder": [pause_s, vector]}
    api.engine.answers = answers[model]


@pytest.mark.parametrize("kind", REQUESTS)
class TestEveryDialect:
    async def test_a_request_holds_a_slot_until_its_end_and_counts_as_in_flight_if_it_is_unary(
        self, api: Served, kind: str
    ) -> None:
        model, path, body = REQUESTS[kind]
        pipeline = "-" if path.startswith("/v2") else {"reader": "read", "writer": "write", "embedder": "embed"}[model]
        scripted(api, model, pause_s=0.2)
        answering = post(api, path, body)
        await until(lambda: running(api) == {model: 1})
        assert await metric(api, "in_flight_requests", pipeline=pipeline) == ("stream" not in kind)
        answer = await answering
        if kind == "resumable stream":
            assert running(api) == {model: 1}, "the stream outlives its POST"
            await asyncio.wait_for(api.gateway.inference.workload.idle(), 5)
        assert answer.status_code < 300 or kind == "embeddings"
        assert running(api) == {}
        assert await metric(api, "in_flight_requests", pipeline=pipeline) == 0

    async def test_excess_requests_are_429_and_never_reach_triton(
        self, api: Served, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("app.admission.scheduler.QUEUE", 1)
        model, path, body = REQUESTS[kind]
        scripted(api, model, pause_s=0.2)
        first = [post(api, path, body) for _ in range(2 if model == "reader" or path.startswith("/v2") else 1)]
        await until(lambda: running(api) == {model: 1})
        await asyncio.sleep(0.02)
        sent = len(api.engine.requests)
        refused = await post(api, path, body)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 5, "the time depends on how long the requests took"
        assert len(api.engine.requests) == sent
        assert await metric(api, "rejected_total", reason="too_many_requests") == 1
        await asyncio.gather(*first)

    async def test_a_failed_request_releases_its_slot(self, api: Served, kind: str) -> None:
        _, path, body = REQUESTS[kind]
        for error in (UpstreamUnavailable("away"), DeadlineExceeded("late"), TooManyRequests("full")):
            api.engine.answers = [error]
            await post(api, path, body)
            await asyncio.wait_for(api.gateway.inference.workload.idle(), 5)
            assert running(api) == {}


async def test_time_in_the_queue_is_reported_separately(api: Served) -> None:
    scripted(api, "reader", pause_s=0.1)
    first, second = (post(api, "/v1/pipelines/read", NOTE) for _ in range(2))
    await until(lambda: running(api) == {"reader": 1})
    await asyncio.sleep(0.02)
    assert await metric(api, "requests_running") == await metric(api, "requests_waiting") == 1
    assert await metric(api, "requests_running_by_pipeline", pipeline="read") == 1
    assert await metric(api, "requests_waiting_by_pipeline", pipeline="read") == 1
    assert await metric(api, "in_flight_limit", model="reader") == 1
    timings = [(await each).headers["server-timing"].split(", ") for each in (first, second)]
    queued = [float(dict(part.split(";dur=") for part in timing)["queue"]) for timing in timings]
    assert queued[0] == 0.0
    assert queued[1] > 50
    assert await metric(api, "queue_seconds_count", pipeline="read") == 2
    labels = {"pipeline": "read", "transport": "unary"}
    whole = await metric(api, "request_duration_seconds_sum", **labels, outcome="ok") or 0
    queue = await metric(api, "queue_seconds_sum", pipeline="read") or 0
    overhead = await metric(api, "overhead_seconds_sum", **labels) or 0
    assert queue > 0.05
    assert overhead < whole - queue - 0.19, (
        "overhead must not include the queue or the two pauses of 0.1 s in the engine"
    )
    assert await metric(api, "requests_waiting") == 0


async def test_a_full_queue_is_429_before_the_body_is_read(api: Served) -> None:
    """A pipeline and its model under its own name share one limit."""
    scripted(api, "reader", pause_s=0.2)
    first = [post(api, *REQUESTS[kind][1:]) for kind in ("pipeline", "pipeline", "infer")]
    await until(lambda: running(api) == {"reader": 1})
    await asyncio.sleep(0.02)
    assert len(api.engine.requests) == 1
    assert (await api.client.post("/v1/pipelines/read", content=unread())).status_code == 429
    assert [(await each).status_code for each in first] == [200, 200, 200]


NAMED_IN_THE_BODY = ["resumable stream", "completion", "completion stream", "embeddings"]


@pytest.mark.parametrize("kind", NAMED_IN_THE_BODY)
async def test_a_request_that_every_pipeline_or_the_drain_rejects_is_not_read(api: Served, kind: str) -> None:
    model, path, body = REQUESTS[kind]
    scripted(api, model, pause_s=0.2)
    first = post(api, path, body)
    await until(lambda: running(api) == {model: 1})
    refused = await post_unread(api, path)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert await metric(api, "rejected_total", reason="too_many_requests") == 1
    await first
    await asyncio.wait_for(api.gateway.inference.workload.idle(), 5)
    api.gateway.inference.workload.start_draining()
    assert (await post_unread(api, path)).status_code == 503


async def test_a_busy_pipeline_rejects_no_request_to_another() -> None:
    """Two pipelines have completions, so the body is read as long as one of them accepts requests."""
    write = CONFIG[CONFIG.index("  write:") : CONFIG.index("  embed:")]
    second = write.replace("  write:", "  second:").replace("model: writer", "model: second")
    engine = FakeEngine.of(WRITER, replace(WRITER, name="second"))
    async with served(engine, f"pipelines:\n{write}{second}") as api:
        scripted(api, "writer", pause_s=0.2)
        first = post(api, *REQUESTS["completion"][1:])
        await until(lambda: running(api) == {"writer": 1})
        busy = await post(api, "/v1/completions", {"model": "write", "prompt": "x"})
        free = await post(api, "/v1/completions", {"model": "second", "prompt": "x"})
        assert (busy.status_code, free.status_code) == (429, 200)
        await first


@pytest.mark.parametrize("kind", NAMED_IN_THE_BODY)
async def test_a_full_key_is_429_before_the_body_is_read(kind: str) -> None:
    keys = [entry("a", limits={"in_flight": 1, "queue": 0}), entry("b")]
    engine = FakeEngine.of(READER, WRITER, EMBEDDER, FREE)
    async with served(engine, CONFIG.replace("queue: 0", "queue: 9"), keys=keys) as api:
        scripted(api, "reader", pause_s=0.2)
        first = post(api, "/v1/pipelines/read", NOTE, **bearer("a"))
        await until(lambda: running(api) == {"reader": 1})
        path = REQUESTS[kind][1]
        assert (await post_unread(api, path, **bearer("a"))).status_code == 429
        assert (await post_unread(api, path, **bearer("c"))).status_code == 401
        assert (await post(api, path, {}, **bearer("b"))).status_code in {400, 422}
        await first


async def post_unread(api: Served, path: str, **headers: str) -> httpx.Response:
    headers = {"Content-Type": "application/json", **headers}
    return await api.client.post(path, content=unread(), headers=headers)


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


async def test_the_catalog_shows_the_limits(api: Served) -> None:
    fixed = (await api.client.get("/v1/pipelines/read")).json()["limits"]
    own = {"in_flight": 1, "adapts": False, "queue": 1, "per_key": None}
    assert fixed == {"timeout_s": 30.0, **own, "body_bytes": 64 * 1024}
    free = (await api.client.get("/v1/pipelines/free")).json()["limits"]
    assert (free["in_flight"], free["adapts"], free["queue"]) == (8, True, 256)


LARGE = """
pipelines:
  large:
    model: reader
    inputs: {x: {tensor: X}}
    outputs: {y: {tensor: Y}}
    batch: true
    limits: {in_flight: %d}
"""
ROWS = model("X FP32 [1]", "Y FP32 [1]", name="reader", max_batch_size=1)


@pytest.fixture(params=[8])
async def large(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A gateway with so many slots, whose requests of one item take 10 ms."""
    engine = FakeEngine.of(ROWS, answers=[0.01, response(tensor("Y", "FP32", [[1]]))])
    async with served(engine, LARGE % request.param) as gateway:
        yield gateway


def send(api: Served, *items: int) -> asyncio.Task[httpx.Response]:
    return post(api, "/v1/pipelines/large", {"x": [*items]})


class TestALargeRequest:
    async def test_its_parts_take_all_slots_and_half_of_them_when_another_request_comes(self, large: Served) -> None:
        infer, goes_on = large.engine.infer, asyncio.Event()

        async def waiting(request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
            if request.inputs[0].array[0, 0] == 2:
                await goes_on.wait()
            return await infer(request, deadline)

        large.engine.infer = waiting  # type: ignore[method-assign]
        whole = send(large, *[1] * 400)
        await until(lambda: sum(running(large).values()) == 8)
        small = send(large, 2)
        await until(lambda: sum(running(large).values()) == 4 + 1)
        goes_on.set()
        assert (await small).status_code == 200
        await until(lambda: sum(running(large).values()) == 8)
        assert (await whole).json() == {"y": [1.0] * 400}
        assert running(large) == {}

    @pytest.mark.parametrize("large", [1], indirect=True)
    async def test_a_small_request_waits_for_one_part_only(self, large: Served) -> None:
        whole = send(large, *[1] * 40)
        await until(lambda: bool(running(large)))
        for _ in range(3):
            assert (await send(large, 1)).status_code == 200
        assert not whole.done()
        assert (await whole).json() == {"y": [1.0] * 40}
        assert running(large) == {}

    async def test_its_parts_are_cancelled_with_it(self, large: Served) -> None:
        whole = send(large, *[1] * 400)
        await until(lambda: len(large.engine.requests) > 4)
        whole.cancel()
        await until(lambda: not running(large))
        sent = len(large.engine.requests)
        await asyncio.sleep(0.05)
        assert len(large.engine.requests) == sent < 400


async def test_every_response_of_a_decoupled_model_reaches_its_limit(api: Served) -> None:
    """The first response has no text, so OpenAI's stream has no chunk for it."""
    calls = [REQUESTS[kind][1:] for kind in REQUESTS if REQUESTS[kind][0] == "writer"]
    calls += [("/v1/pipelines/write", WORDS), ("/v2/models/writer/generate", {"PROMPT": "x"})]
    api.engine.answers = [word(b"", 1), FINAL]
    await api.client.post("/v1/pipelines/write", json=WORDS)
    told = []
    for path, body in calls:
        await until(lambda: not running(api))
        api.gateway.inference.admission.model_queues["writer"].limit = spy = Mock(StreamLimit, value=8)
        assert (await api.client.post(path, json=body)).status_code in (200, 201)
        told.append(spy.method_calls)
    await until(lambda: not running(api))
    assert [[name for name, *_ in calls] for calls in told] == [["started", "output", "output", "ended"]] * 7
