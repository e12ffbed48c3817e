"""A gateway for each test, with an engine whose answers the test defines."""

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx

from app.api.bodies import Limits
from app.core.inference import InferenceResponse
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.models import model, response, tensor

CONFIG = """
pipelines:
  read:
    description: Read <an> image.
    model: reader
    inputs: {image: {tensor: IMAGE, kind: image}, note: {tensor: NOTE, kind: text, optional: true}}
    outputs: {text: {tensor: TEXT, kind: text}, scores: {tensor: SCORES}}
    parameters: {n: {type: integer, minimum: 1, maximum: 9, default: 3}}
    early_exit: [{reason: no_text, error: {code: ALREADY_EXISTS, message: EXIT}}]
    sample: {image: sample.png}
    warmup: false
  write:
    model: writer
    inputs: {prompt: {tensor: PROMPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}, token_id: {tensor: TOKEN_ID}}
    parameters: {seed: {type: integer, optional: true}}
    contract: {TOKEN_ID: {max_items: 1}}
    cancel: {model: writer, input: CANCEL}
    sample: {prompt: "It's <here> & now"}
    warmup: false
    stream: {commit_s: 0.05, progress_s: 5}
"""
ORIGIN = "https://page.example"
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8
READER = model(["IMAGE BYTES [1]", "NOTE BYTES [1] optional"], ["TEXT BYTES [1]", "SCORES FP32 [-1]"], name="reader")
WRITER = model("PROMPT BYTES [1]", ["TEXT BYTES [1]", "TOKEN_ID INT32 [1]"], name="writer", decoupled=True)
FINAL = InferenceResponse({}, is_final=True)
READ = response(tensor("TEXT", "BYTES", [b"hi"]), tensor("SCORES", "FP32", [0.5, float("nan")]))


def word(text: bytes, token: int) -> InferenceResponse:
    return response(tensor("TEXT", "BYTES", [text]), tensor("TOKEN_ID", "INT32", [token]), is_final=False)


def counted(api: Served, pipeline: str, transport: str) -> dict[str, float]:
    """Returns the number of requests by outcome."""
    return {
        each.labels["outcome"]: each.value
        for family in api.gateway.inference.metrics.requests.collect()
        for each in family.samples
        if each.name.endswith("_total") and (each.labels["pipeline"], each.labels["transport"]) == (pipeline, transport)
    }


def events(answer: httpx.Response) -> list[tuple[int, str, Any]]:
    frames = [frame.split("\n") for frame in answer.text.split("\n\n") if frame.startswith("id: ")]
    return [(int(f[0].removeprefix("id: ")), f[1].removeprefix("event: "), json.loads(f[2][6:])) for f in frames]


OPTIONS: dict[str, Any] = {"origins": (ORIGIN,), "files": {"sample.png": PNG}}


def scripted(config: str = CONFIG, **options: Any) -> AbstractAsyncContextManager[Served]:
    """``options`` are those of ``served``."""
    return served(FakeEngine.of(READER, WRITER, answers=[READ]), config, **(OPTIONS | options))


def scripted_fixture(config: str = CONFIG, **options: Any) -> Any:
    """A fixture of such a gateway."""
    return gateway_fixture(config, READER, WRITER, answers=[READ], **(OPTIONS | options))


api = scripted_fixture()
roomy = scripted_fixture(limits=Limits(8 * 1024 * 1024))
"""A gateway that accepts bodies of 8 MiB."""
