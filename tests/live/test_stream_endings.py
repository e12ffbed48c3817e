"""Exactly one terminal event for each way in which a stream can end, with the real Triton."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.toolkit.events import Event, checked, events_in, lines_of, read_stream
from tests.toolkit.processes import (
    LIVE,
    GatewayProcess,
    running_gateway,
    running_triton,
    scripted_models,
    wait_until_ready,
)

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


@pytest.fixture(scope="module")
def own_triton(models_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A Triton for this module only, because a test stops it."""
    models = scripted_models(tmp_path_factory.mktemp("stopped") / "models")
    with running_triton(EmbeddedOptions(models, models_venv)) as triton:
        yield triton


@pytest.fixture(scope="module")
def own_gateway(own_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Has frequent pings, and the pipeline ``short`` with a shorter total deadline."""
    folder = tmp_path_factory.mktemp("own")
    pipelines = yaml.safe_load(Path(CONFIG).read_text())["pipelines"]
    plan = pipelines["scripted_stream"]
    pipelines["short"] = plan | {"stream": plan["stream"] | {"timeout_s": 3.0}}
    (folder / "gateway.yaml").write_text(json.dumps({"pipelines": pipelines}))
    settings = {
        "triton_url": own_triton.grpc_url,
        "config": str(folder / "gateway.yaml"),
        "ping_s": "0.2",
        "drain_s": "1",
    }
    with running_gateway(folder / "gateway", **settings) as gateway:
        yield gateway


CONFIG = str(LIVE / "gateway.yaml")
"""Only the scripted pipelines, because a gateway with the reference pipelines starts more slowly."""


def script(**fields: Any) -> dict[str, str]:
    return {"script": json.dumps(fields)}


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_stream_ends_with_one_terminal_event(client: httpx.Client, name: str) -> None:
    fields, outputs, terminal, reason = SCRIPTED[name]
    check_ending(read_stream(client, "scripted_stream", script(**fields)), outputs, terminal, reason)


def check_ending(events: list[Event], outputs: int, terminal: str, reason: str) -> None:
    last = events[-1]
    assert last.name == terminal
    assert last.data["reason" if terminal == "done" else "code"] == reason
    assert len(events) - 1 == outputs
    if terminal == "done":
        assert last.data["outputs"] == len(events) - 1
        assert last.data["early_exit"] == ("nothing" if reason == "early_exit" else None)


def test_the_total_deadline_ends_a_stream_with_one_terminal_event(own_gateway: GatewayProcess) -> None:
    with httpx.Client(base_url=own_gateway.url, timeout=20) as client:
        events = read_stream(client, "short", script(outputs=1000, interval_s=0.5))
    check_ending(events, len(events) - 1, "error", "deadline_exceeded")


def test_a_stopped_triton_ends_the_stream(own_triton: EmbeddedTriton, own_gateway: GatewayProcess) -> None:
    assert own_triton.pid is not None
    process = psutil.Process(own_triton.pid)
    events = stream_and_do(own_gateway, process.suspend)
    process.resume()
    assert events[-1].data["code"] in {"deadline_exceeded", "upstream_unavailable"}
    wait_until_ready(own_gateway)


def stream_and_do(gateway: GatewayProcess, act: Any) -> list[Event]:
    """Calls ``act`` after the first output of a stream, and returns all events of the stream."""
    body = script(outputs=50, interval_s=0.1)
    with httpx.stream("POST", f"{gateway.url}/v1/pipelines/scripted_stream/stream", json=body, timeout=20) as answer:
        lines = lines_of(answer)
        first = [next(lines) for _ in range(4)]
        act()
        return checked(list(events_in([*first, *lines])))
