"""``stream: {first_output_s}`` allows a long silence before the first output, at every address that streams."""

from typing import Any

import pytest

from app.core.inference import InferenceResponse
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.models import model, response, tensor

CONFIG = """
pipelines:
  write:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: {progress_s: 0.05, first_output_s: 300}
    openai: {completions: {}}
  short:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: {progress_s: 0.05}
"""
WRITER = model("PROMPT BYTES [1]", "TEXT BYTES [1]", name="writer", decoupled=True)
WORD = response(tensor("TEXT", "BYTES", [b"hi"]), is_final=False)
LATE = [0.2, WORD, InferenceResponse({}, is_final=True)]


api = gateway_fixture(CONFIG, WRITER, answers=LATE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/pipelines/write/stream", {"prompt": "Hi"}),
        ("/v1/completions", {"model": "write", "prompt": "Hi", "stream": True}),
        ("/v2/models/writer/generate_stream", {"PROMPT": "Hi"}),
    ],
)
async def test_the_first_output_may_come_late(api: Served, path: str, body: dict[str, Any]) -> None:
    answer = await api.client.post(path, json=body)
    assert answer.status_code == 200
    assert "hi" in answer.text
    assert "deadline_exceeded" not in answer.text


async def test_the_first_output_of_a_resumable_stream_may_come_late(api: Served) -> None:
    started = await api.client.post("/v1/streams", json={"pipeline": "write", "inputs": {"prompt": "Hi"}})
    answer = await api.client.get(started.headers["location"])
    assert "event: done" in answer.text


async def test_it_is_progress_s_by_default(api: Served) -> None:
    answer = await api.client.post("/v1/pipelines/short/stream", json={"prompt": "Hi"})
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")


async def test_under_v2_the_longest_of_the_pipelines_applies(api: Served) -> None:
    assert api.gateway.inference.catalog.oip_models.rules("writer").first_output_s == 300


async def test_the_catalog_shows_both_times(api: Served) -> None:
    for name, first_output_s in (("write", 300), ("short", 0.05)):
        limits = (await api.client.get(f"/v1/pipelines/{name}")).json()["limits"]["stream"]
        assert (limits["first_output_s"], limits["progress_s"]) == (first_output_s, 0.05)
