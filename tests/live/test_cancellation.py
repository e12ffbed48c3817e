"""How requests end: by a disconnect, by a short deadline, and each stream with exactly one terminal event."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.core.errors import GatewayError
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.launcher.embedded_triton import EmbeddedTriton
from app.shared_memory.layout import LARGE_BYTES
from app.shared_memory.leases import SharedMemory
from app.triton.connect import MAX_MESSAGE_BYTES, open_transport, registry_of
from app.triton.triton_engine import TritonEngine
from tests.toolkit.connections import Connection
from tests.toolkit.events import Event, checked, events_in, lines_of, read_stream
from tests.toolkit.executions import check_usually_below, settled_executions
from tests.toolkit.processes import LIVE, GatewayProcess, live_gateway, live_triton, scripted_models, wait_until_ready
from tests.toolkit.raw_http import dialed, get, post, received, rest
from tests.toolkit.waiting import eventually


async def leave_after(gateway: GatewayProcess, request: bytes, until: bytes = b"", pause_s: float = 0.0) -> float:
    """Sends a request, reads until ``until``, waits and disconnects. Returns the time."""
    connection = await Connection.to(gateway)
    try:
        connection.writer.write(request)
        if until:
            await connection.reader.readuntil(until)
        await asyncio.sleep(pause_s)
        return time.monotonic()
    finally:
        connection.writer.transport.abort()


@pytest.mark.parametrize(
    ("path", "fields", "until"),
    [
        ("/v1/pipelines/scripted_stream/stream", {"outputs": 50, "interval_s": 0.05}, b"id: 3"),
        ("/v1/pipelines/scripted_stream/stream", {"outputs": 1, "interval_s": 2.5}, b""),
        ("/v1/pipelines/scripted_stream/stream", {"outputs": 1, "interval_s": 2.5}, b"200 OK"),
        ("/v1/pipelines/scripted_stream", {"outputs": 50, "interval_s": 0.05}, b""),
        ("/v1/pipelines/scripted", {"sleep_s": 4}, b""),
    ],
    ids=["after outputs", "before headers", "before the first output", "unary over a decoupled model", "unary"],
)
async def test_a_disconnect_cancels_the_request_of_the_model(
    gateway: GatewayProcess, tmp_path: Path, path: str, fields: dict[str, Any], until: bytes
) -> None:
    notice = tmp_path / "notice"
    request = post(path, {"script": json.dumps({**fields, "notice": str(notice)})})
    left = await leave_after(gateway, request, until, pause_s=0.1)
    await asyncio.to_thread(eventually, lambda: notice.exists() and bool(notice.read_text()))
    assert float(notice.read_text().split()[0]) >= left - 0.1


def test_the_cancel_hook_stops_a_step_inside_an_ensemble(gateway: GatewayProcess, triton: EmbeddedTriton) -> None:
    """Without the hook, Triton computes all 500 tokens. The bound is half of them."""
    check_usually_below(251, lambda: asyncio.run(_tokens_after_a_disconnect(gateway, triton)))


async def _tokens_after_a_disconnect(gateway: GatewayProcess, triton: EmbeddedTriton) -> float:
    """Returns how many tokens Triton computed that the gateway did not relay."""
    before = await asyncio.to_thread(settled_executions, triton, "text_detokenize")
    relayed_before = gateway.metric("stream_outputs_total", pipeline="write")
    body = {"prompt": "The for statement", "max_tokens": 500, "seed": 3, "temperature": 1.0}
    await leave_after(gateway, post("/v1/pipelines/write/stream", body), b"id: 5\n")
    await asyncio.to_thread(eventually, lambda: gateway.metric("active_streams") == 0)
    computed = await asyncio.to_thread(settled_executions, triton, "text_detokenize") - before
    assert computed >= 5
    return computed - (gateway.metric("stream_outputs_total", pipeline="write") - relayed_before)


CLIENTS = 8
SHORTEST_S, LONGEST_S = 0.001, 0.1
MIB = 1024 * 1024
ENDS = {"DeadlineExceeded", "ModelError", "TooManyRequests", "ok"}
"""No call reports that Triton is gone."""


def write_models(repository: Path) -> None:
    scripted_models(repository)
    for name in ("ocr_bls", "text_detect", "text_recognize"):
        (repository / name).symlink_to(LIVE.parents[1] / "triton_models" / name)


own_triton = live_triton(write_models)  # not started again: the last test kills it


@dataclass(frozen=True)
class Caller:
    """Calls ``ocr_bls``. ``padding``: bytes after the end of each image, so that it is large enough for its way."""

    engine: TritonEngine
    is_stream: bool
    padding: int

    async def answer(self, image: bytes, timeout_s: float) -> InferenceResponse:
        """Raises GatewayError."""
        tensor = Tensor("IMAGE", "BYTES", bytes_array([image + b"\0" * self.padding], (1, 1)))
        parameters = {"deadline_unix_ms": int((time.time() + timeout_s) * 1000)}
        request = InferenceRequest("ocr_bls", (tensor,), parameters=parameters)
        deadline = Deadline(time.monotonic() + timeout_s)
        if not self.is_stream:
            return await self.engine.infer(request, deadline)
        async with aclosing(self.engine.infer_stream(request, deadline)) as responses:
            return await anext(responses)


@pytest.fixture(params=["wire", "shared memory", "stream"])
async def caller(request: pytest.FixtureRequest, own_triton: EmbeddedTriton) -> AsyncIterator[Caller]:
    async with open_transport(own_triton.grpc_url) as transport:
        shared_memory = (
            SharedMemory(registry_of(transport), 256 * MIB, MAX_MESSAGE_BYTES)
            if request.param == "shared memory"
            else None
        )
        engine = TritonEngine(transport, shared_memory=shared_memory)
        cleaning = None
        if shared_memory is not None:
            shared_memory.learn(await engine.model_config("ocr_bls"), "")
            cleaning = asyncio.create_task(shared_memory.run())
        yield Caller(engine, request.param == "stream", 0 if shared_memory is None else LARGE_BYTES)
        await engine.close()
        if cleaning is not None:
            cleaning.cancel()


@pytest.fixture
def images(pytestconfig: pytest.Config) -> list[bytes]:
    """Images that need both models, one model, and none."""
    samples = [(pytestconfig.rootpath / "samples" / name).read_bytes() for name in ("sign.png", "blank.png")]
    return [*samples, b"no image"]


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_triton_survives_deadlines_of_1_to_100_ms(caller: Caller, images: list[bytes], count: int) -> None:
    ends, remaining = Counter[str](), iter(range(count))
    chance = random.Random(count)

    async def client() -> None:
        for _ in remaining:
            try:
                await caller.answer(chance.choice(images), chance.uniform(SHORTEST_S, LONGEST_S))
                ends["ok"] += 1
            except GatewayError as exc:
                ends[type(exc).__name__] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    answer = await caller.answer(images[0], 30.0)
    assert answer.outputs["TEXTS"].array.size
    assert ends.keys() <= ENDS, ends
    assert ends["DeadlineExceeded"] > count / 2


CONFIG = """
pipelines:
  words:
    model: scripted_stream
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: {progress_s: 2, timeout_s: 60}
    openai: {completions: {prompt: script}}
oip: {models: [scripted_stream]}
"""
EXIT = {"then": "error", "error": {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[nothing]"}}
SCRIPTED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "complete, separate final response": ({"outputs": 3}, 3, "done", "complete"),
    "complete, final flag on the last output": ({"outputs": 3, "then": "final_with_last"}, 3, "done", "complete"),
    "zero outputs": ({"outputs": 0}, 0, "done", "complete"),
    "early exit before any output": ({"outputs": 0, **EXIT}, 1, "done", "early_exit"),
    "early exit after two outputs": ({"outputs": 2, **EXIT}, 2, "done", "early_exit"),
    "model error after two outputs": ({"outputs": 2, "then": "error"}, 2, "error", "model_error"),
    "contract violation by the third output": ({"outputs": 5, "items": [1, 2, 5]}, 2, "error", "contract_violation"),
    "silence": ({"outputs": 2, "then": "silence"}, 2, "error", "deadline_exceeded"),
}
SHORT, ENDLESS = {"outputs": 1}, {"outputs": 1000, "interval_s": 0.1}


def openai(script: dict[str, Any], *, stream: bool) -> dict[str, object]:
    return {"model": "words", "prompt": json.dumps(script), "stream": stream}


UNARY: dict[str, tuple[str, object]] = {
    "pipelines": ("/v1/pipelines/words", {"script": json.dumps(SHORT)}),
    "openai": ("/v1/completions", openai(SHORT, stream=False)),
    "oip": ("/v2/models/scripted_stream/generate", {"SCRIPT": json.dumps(SHORT)}),
}
STREAMS: dict[str, tuple[str, object]] = {
    "pipelines": ("/v1/pipelines/words/stream", {"script": json.dumps(ENDLESS)}),
    "openai": ("/v1/completions", openai(ENDLESS, stream=True)),
    "oip": ("/v2/models/scripted_stream/generate_stream", {"SCRIPT": json.dumps(ENDLESS)}),
}


own_gateway = live_gateway(CONFIG, "own_triton", drain_s="1")


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_stream_ends_with_one_terminal_event(client: httpx.Client, name: str) -> None:
    fields, outputs, terminal, reason = SCRIPTED[name]
    events = read_stream(client, "scripted_stream", {"script": json.dumps(fields)})
    last = events[-1]
    assert last.name == terminal
    assert last.data["reason" if terminal == "done" else "code"] == reason
    assert len(events) - 1 == outputs
    if terminal == "done":
        assert last.data["outputs"] == len(events) - 1
        assert last.data["early_exit"] == ("nothing" if reason == "early_exit" else None)


def test_a_stopped_triton_ends_the_stream(own_triton: EmbeddedTriton, own_gateway: GatewayProcess) -> None:
    assert own_triton.pid is not None
    process = psutil.Process(own_triton.pid)
    url, body = f"{own_gateway.url}/v1/pipelines/words/stream", {"script": json.dumps(ENDLESS)}
    with httpx.stream("POST", url, json=body, timeout=20) as answer:
        lines = lines_of(answer)
        first = [next(lines) for _ in range(4)]
        process.suspend()
        events: list[Event] = checked(list(events_in([*first, *lines])))
    process.resume()
    assert events[-1].data["code"] in {"deadline_exceeded", "upstream_unavailable"}
    wait_until_ready(own_gateway)


def test_a_killed_triton_closes_the_connection_with_the_error_in_every_dialect(
    own_triton: EmbeddedTriton, own_gateway: GatewayProcess
) -> None:
    """Another replica would not give this error: the next connection of the client may reach one.

    Kills Triton, so no later test can use the gateway.
    """
    streams = {name: dialed(own_gateway) for name in (*STREAMS, "resumable")}
    for name, (path, body) in STREAMS.items():
        streams[name].sendall(post(path, body))
    started = {"pipeline": "words", "inputs": {"script": json.dumps(ENDLESS)}}
    location = httpx.post(f"{own_gateway.url}/v1/streams", json=started).headers["location"]
    streams["resumable"].sendall(get(location))
    for connection in streams.values():
        assert received(connection, b"word").startswith(b"HTTP/1.1 200")
    assert own_triton.pid is not None
    os.kill(own_triton.pid, signal.SIGKILL)
    for name, connection in streams.items():
        assert b"error" in rest(connection), name
    for name, (path, body) in {**UNARY, **{f"{name} stream": each for name, each in STREAMS.items()}}.items():
        connection = dialed(own_gateway)
        connection.sendall(post(path, body))
        answer = rest(connection).lower()
        assert answer.startswith(b"http/1.1 503"), name
        assert answer.count(b"\r\nconnection: close\r\n") == 1, name
