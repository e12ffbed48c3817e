"""Errors that another replica would not give: they close the client's connection, so that its next one may reach it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton, scripted_models
from tests.toolkit.raw_http import dialed, get, post, received, rest

CONFIG = """
pipelines:
  words:
    model: scripted_stream
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: {progress_s: 20, timeout_s: 60}
    openai: {completions: {prompt: script}}
oip: {models: [scripted_stream]}
"""
SCRIPT = '{"outputs": 1}'
ENDLESS = '{"outputs": 1000, "interval_s": 0.1}'


def openai(script: str, *, stream: bool) -> dict[str, object]:
    return {"model": "words", "prompt": script, "stream": stream}


UNARY: dict[str, tuple[str, object]] = {
    "pipelines": ("/v1/pipelines/words", {"script": SCRIPT}),
    "openai": ("/v1/completions", openai(SCRIPT, stream=False)),
    "oip": ("/v2/models/scripted_stream/generate", {"SCRIPT": SCRIPT}),
}
STREAMS: dict[str, tuple[str, object]] = {
    "pipelines": ("/v1/pipelines/words/stream", {"script": ENDLESS}),
    "openai": ("/v1/completions", openai(ENDLESS, stream=True)),
    "oip": ("/v2/models/scripted_stream/generate_stream", {"SCRIPT": ENDLESS}),
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    """Not started again: the last test kills it."""
    repository = scripted_models(tmp_path_factory.mktemp("mortal") / "models")
    with running_triton(EmbeddedOptions(repository, models_venv)) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("replica")
    (folder / "gateway.yaml").write_text(CONFIG)
    with running_gateway(folder, triton_url=triton.grpc_url, config=str(folder / "gateway.yaml")) as process:
        yield process


def test_other_errors_keep_the_connection(gateway: GatewayProcess) -> None:
    connection = dialed(gateway)
    answers = []
    for path, body, status in (
        ("/v1/pipelines/words", {}, 422),
        ("/v1/pipelines/words", {"script": '{"raise": "scripted"}'}, 502),
        ("/v1/pipelines/unknown", {}, 404),
        ("/v1/pipelines/words", {"script": SCRIPT}, 200),
    ):
        connection.sendall(post(path, body))
        answers.append((received(connection, b"}").decode().split(" ")[1], str(status)))
    connection.close()
    assert [found for found, _ in answers] == [expected for _, expected in answers]


def test_every_dialect_closes_the_connection_with_the_error(triton: EmbeddedTriton, gateway: GatewayProcess) -> None:
    """Kills Triton, so no later test can use the gateway."""
    streams = {name: dialed(gateway) for name in (*STREAMS, "resumable")}
    for name, (path, body) in STREAMS.items():
        streams[name].sendall(post(path, body))
    started = httpx.post(f"{gateway.url}/v1/streams", json={"pipeline": "words", "inputs": {"script": ENDLESS}})
    streams["resumable"].sendall(get(started.headers["location"]))
    for connection in streams.values():
        assert received(connection, b"word").startswith(b"HTTP/1.1 200")
    assert triton.pid is not None
    os.kill(triton.pid, signal.SIGKILL)
    for name, connection in streams.items():
        assert b"error" in rest(connection), name
    for name, (path, body) in {**UNARY, **{f"{name} stream": each for name, each in STREAMS.items()}}.items():
        connection = dialed(gateway)
        connection.sendall(post(path, body))
        answer = rest(connection).lower()
        assert answer.startswith(b"http/1.1 503"), name
        assert answer.count(b"\r\nconnection: close\r\n") == 1, name
