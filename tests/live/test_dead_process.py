"""A model whose process died or hangs: Triton 2.51 reports it as ready. Its streams end, and it is repaired."""

import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.sessions import wait_for_new_triton
from tests.toolkit.arenas import lock_arenas
from tests.toolkit.events import Event, events_in, lines_of
from tests.toolkit.processes import (
    LIVE,
    GatewayProcess,
    configured_gateway,
    linked_models,
    live_triton,
    running_gateway,
    wait_until_ready,
)
from tests.toolkit.waiting import PATIENCE_S, eventually, repeated

BOTH = ("scripted", "other")
CONFIG = {
    name: {
        "model": name,
        "inputs": {"script": {"tensor": "SCRIPT", "kind": "text"}},
        "outputs": {"text": {"tensor": "TEXT", "kind": "text"}},
        "sample": {"script": "{}"},
    }
    for name in BOTH
}
STREAM_CONFIG = """
pipelines:
  stream:
    model: scripted_stream
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text, join: concatenate}, token_id: {tensor: TOKEN_ID, join: list}}
    stream: {progress_s: 60, timeout_s: 120}
    timeout_s: 120
    sample: {script: '{"outputs": 1}'}
"""


own_triton = live_triton(linked_models, restarts=True, first_restart_s=0.2)


def processes_of(triton: int | None, model: str) -> list[int]:
    return [
        each.pid
        for each in psutil.process_iter(["ppid", "cmdline"])
        if each.info["ppid"] == triton and f"/{model}/1/model.py" in " ".join(each.info["cmdline"] or [])
    ]


def both_processes_of(triton: int | None, model: str) -> list[int]:
    found = processes_of(triton, model)
    assert len(found) == 2
    return found


def ask(gateway: GatewayProcess, pipeline: str = "scripted") -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/pipelines/{pipeline}", json={"script": "{}"}, timeout=PATIENCE_S)


def test_with_repair_the_model_works_again(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    config = {"scripted": CONFIG["scripted"]}
    with configured_gateway(own_triton, tmp_path, config, triton_repair="true") as gateway:
        assert ask(gateway).status_code == 200
        for process in both_processes_of(own_triton.pid, "scripted"):
            os.kill(process, signal.SIGKILL)
        first = ask(gateway)
        assert (first.status_code, first.json()["code"], first.json()["retryable"]) == (503, "model_not_ready", True)
        assert int(first.headers["Retry-After"]) > 0
        assert "GATEWAY_TRITON_REPAIR" not in first.text
        eventually(lambda: "model 'scripted' is called again" in gateway.log)
        wait_until_ready(gateway, PATIENCE_S)
        assert [ask(gateway).status_code for _ in range(4)] == [200] * 4
        assert gateway.metric("stub_deaths_total", model="scripted") == 1


SENT_S = 1.0
"""The time in which a model that has sent an output gives back the lock that it shares with Triton."""


def last_event(triton: EmbeddedTriton, gateway: GatewayProcess) -> Event:
    """Kills the process below a stream after its output, and returns the last event.

    Triton 2.51 aborts if a process dies while it holds a lock that both share.
    """
    body = {"script": json.dumps({"outputs": 1, "then": "silence"})}
    url = f"{gateway.url}/v1/pipelines/stream/stream"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        events = events_in(lines_of(answer))
        assert next(events).name == "output"
        (process,) = processes_of(triton.pid, "scripted_stream")
        time.sleep(SENT_S)
        os.kill(process, signal.SIGKILL)
        (last,) = events
    return last


def test_a_stream_of_a_dead_process_ends_with_a_retryable_error(own_triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Triton 2.51 itself aborts after some kills. Then the test begins anew with the next Triton."""

    def works_again() -> bool:
        return httpx.post(f"{gateway.url}/v1/pipelines/stream", json={"script": '{"outputs": 1}'}).status_code == 200

    with configured_gateway(own_triton, tmp_path, STREAM_CONFIG, triton_repair="true") as gateway:
        for _ in range(3):
            triton = own_triton.pid
            last = last_event(own_triton, gateway)
            if "Triton cannot be reached" not in last.data["detail"]:
                break
            wait_for_new_triton(gateway, own_triton, triton)
        assert (last.name, last.data["retryable"]) == ("error", True)
        assert last.data["detail"] == "The process of the model ended before the stream was complete."
        eventually(works_again)


def pid_of_triton(gateway: GatewayProcess) -> int:
    below = psutil.Process(gateway.process.pid).children(recursive=True)
    return next(each.pid for each in below if each.name() == "tritonserver")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "hung"), [("2", ["scripted"]), ("1", ["scripted", "other"])])
def test_hung_models_of_an_embedded_triton_answer_again(
    tmp_path: Path, models_venv: Path, workers: str, hung: list[str]
) -> None:
    """Their processes wait for a lock of malloc. One model is reloaded; if all models hang, Triton is restarted."""
    pipelines = {name: spec | {"timeout_s": 1} for name, spec in CONFIG.items()}
    (tmp_path / "gateway.yaml").write_text(json.dumps({"pipelines": pipelines}))
    for name in BOTH:
        folder = shutil.copytree(LIVE / "models" / "scripted", tmp_path / "repository" / name)
        text = (folder / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(text.replace('name: "scripted"', f'name: "{name}"'))
    settings = {"embedded": "true", "embedded_repository": str(tmp_path / "repository"), "workers": workers}
    settings |= {"embedded_venv": str(models_venv), "config": str(tmp_path / "gateway.yaml")}

    def statuses(names: list[str]) -> list[int]:
        return [ask(gateway, name).status_code for name in names]

    def states(names: list[str]) -> set[str]:
        found = httpx.get(f"{gateway.admin_url}/health/ready").json()["pipelines"]
        return {found[name] for name in names}

    with running_gateway(tmp_path / "gateway", **settings) as gateway:
        assert statuses([*BOTH]) == [200, 200]
        triton = pid_of_triton(gateway)
        for model in hung:
            for process in both_processes_of(triton, model):
                lock_arenas(process)
        with repeated(*(partial(ask, gateway, name) for name in hung), pause_s=0.2):
            eventually(lambda: "its breaker is open" in gateway.log or "does not answer" in gateway.log, 60)
            eventually(lambda: "ready" not in states(hung), 60)
            for name in set(BOTH) - set(hung):
                assert (statuses([name]), states([name])) == ([200], {"ready"})
            eventually(lambda: statuses(hung) == [200] * len(hung), 150)
        eventually(lambda: states([*BOTH]) == {"ready"})
        assert (pid_of_triton(gateway) == triton) == (len(hung) == 1)
