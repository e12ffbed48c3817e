"""Exactly one terminal event for each way in which a stream can end, with a real Triton that is stopped and killed."""

import json
import os
import signal
from typing import Any

import httpx
import psutil
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.events import Event, checked, events_in, lines_of, read_stream
from tests.toolkit.processes import GatewayProcess, live_gateway, live_triton, scripted_models, wait_until_ready
from tests.toolkit.raw_http import dialed, get, post, received, rest

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


own_triton = live_triton(scripted_models)  # not started again: the last test kills it
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
