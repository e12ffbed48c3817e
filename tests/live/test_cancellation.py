"""How requests end: by a disconnect, by a short deadline, and by the end of Triton."""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.shared_memory.regions import LARGE_BYTES
from tests.live.sessions import kill_triton
from tests.toolkit.connections import Connection, dialed, get, post, received, rest
from tests.toolkit.processes import GatewayProcess, linked_models, live_gateway, live_triton, settled_executions
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
    """Without the hook, Triton computes all 500 tokens. The bound is half of them.

    Another program can delay a cancellation on its way to Triton, but not most of them.
    """
    tokens = [asyncio.run(_tokens_after_a_disconnect(gateway, triton))]
    if tokens[0] > 250:
        tokens += [asyncio.run(_tokens_after_a_disconnect(gateway, triton)) for _ in range(4)]
    assert median(tokens) <= 250, tokens


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


CONFIG = """
pipelines:
  words:
    model: scripted_stream
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: {progress_s: 2, timeout_s: 60}
    openai: {completions: {prompt: script}}
  ocr:
    model: ocr_bls
    inputs: {image: {tensor: IMAGE, kind: image}}
    outputs: {texts: {tensor: TEXTS, kind: text}}
    early_exit: [{reason: no_text, error: {code: ALREADY_EXISTS, message: "EARLY_EXIT[no_text]"}}]
    rejects_input: [ocr_bls]
    deadline_parameter: deadline_unix_ms
    stream: true
oip: {models: [scripted_stream]}
"""
MODELS = ("scripted_stream", "ocr_bls", "text_detect", "text_recognize")
own_triton = live_triton(lambda folder: linked_models(folder, MODELS))  # not started again: the last test kills it
own_gateway = live_gateway(CONFIG, "own_triton", drain_s="1", shared_memory_bytes=str(256 * MIB))


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("way", ["wire", "shared memory", "stream"])
async def test_triton_survives_deadlines_of_1_to_100_ms(
    own_gateway: GatewayProcess, pytestconfig: pytest.Config, way: str, count: int
) -> None:
    """The images need both models, one model, and none. For shared memory, bytes after their end make them large."""
    path = "/v1/pipelines/ocr/stream" if way == "stream" else "/v1/pipelines/ocr"
    padding = LARGE_BYTES if way == "shared memory" else 0
    samples = [(pytestconfig.rootpath / "samples" / name).read_bytes() for name in ("sign.png", "blank.png")]
    images = [image + b"\0" * padding for image in (*samples, samples[0][:100])]
    statuses, remaining, chance = Counter[int](), iter(range(count)), random.Random(count)
    before = own_gateway.metric("large_calls_total", way="shared_memory")

    async def answer(session: httpx.AsyncClient, image: bytes, timeout_s: float) -> httpx.Response:
        headers = {"X-Request-Timeout": f"{timeout_s:.4f}"}
        return await session.post(path, files={"image": image}, headers=headers)

    async def client() -> None:
        async with httpx.AsyncClient(base_url=own_gateway.url, timeout=30) as session:
            for _ in remaining:
                found = await answer(session, chance.choice(images), chance.uniform(SHORTEST_S, LONGEST_S))
                statuses[found.status_code] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    async with httpx.AsyncClient(base_url=own_gateway.url, timeout=30) as session:
        assert "Hello Triton gateway" in (await answer(session, images[0], 30.0)).text
    assert statuses.keys() <= {200, 422, 429, 504}, "no call reports that Triton is gone"
    assert statuses[504] > count / 2
    assert (own_gateway.metric("large_calls_total", way="shared_memory") > before) is (padding > 0)


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
    kill_triton(own_triton)
    for name, connection in streams.items():
        assert b"error" in rest(connection), name
    for name, (path, body) in {**UNARY, **{f"{name} stream": each for name, each in STREAMS.items()}}.items():
        connection = dialed(own_gateway)
        connection.sendall(post(path, body))
        answer = rest(connection).lower()
        assert answer.startswith(b"http/1.1 503"), name
        assert answer.count(b"\r\nconnection: close\r\n") == 1, name
