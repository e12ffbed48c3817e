"""Messages on the terminal while the process is not ready."""

import asyncio
import json
from pathlib import Path

from app.process.serving import hard_to_try
from tests.toolkit.models import ensemble, model, pipeline
from tests.toolkit.processes import GatewayProcess, free_ports, running_gateway
from tests.toolkit.triton import FakeTriton, serving
from tests.toolkit.waiting import eventually


def config(folder: Path) -> str:
    path = folder / "gateway.yaml"
    path.write_text("pipelines: {shown: {model: m}, other: {model: m, readiness: optional}}")
    return str(path)


def wait_for_one(message: str, gateway: GatewayProcess) -> None:
    eventually(lambda: message in gateway.log)
    assert [json.loads(line)["message"] for line in gateway.log.splitlines()].count(message) == 1


def test_the_message_names_the_triton_that_is_not_ready(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = {"triton_url": f"127.0.0.1:{port}", "config": config(tmp_path)}
    with running_gateway(tmp_path / "gateway", ready=False, **settings) as gateway:
        wait_for_one(f"Waiting for Triton at 127.0.0.1:{port}.", gateway)


async def test_the_message_names_the_pipelines_that_are_not_ready(tmp_path: Path) -> None:
    async with serving(FakeTriton()) as triton:
        settings = {"triton_url": triton.url, "config": config(tmp_path)}
        with running_gateway(tmp_path / "gateway", ready=False, **settings) as gateway:
            await asyncio.to_thread(wait_for_one, "Waiting for shown (model not ready).", gateway)


def test_the_first_call_that_is_shown_is_one_that_a_person_can_read() -> None:
    """An ensemble over a text comes before one over numbers, a plain model, and values that are too long to list."""
    text, numbers = model("T BYTES [1]", "Y FP32 [4]"), model("X FP32 [4]", "Y FP32 [4]")
    best = [
        pipeline(text, sample={"T": "a"}),
        pipeline(ensemble("whole", text), text),
        pipeline(ensemble("whole", numbers), numbers),
        pipeline(text),
        pipeline(numbers),
        pipeline(model("X FP32 [3,640,640]", "Y FP32 [4]")),
    ]
    keys = [hard_to_try(each) for each in best]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
