"""Early exits with the real Triton: each kind of composition, empty and partial results."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from PIL import Image, ImageDraw, ImageFont

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.events import read_stream
from tests.toolkit.processes import ROOT, GatewayProcess, embedded, live_gateway, running_gateway, settled_executions

EARLY_EXIT_KEY = "the key of tests"
"""The key of the scripted models' signatures, unless the environment of Triton sets another key."""
MARKER = "EARLY_EXIT[nothing]"
PATTERN = r"EARLY_EXIT\[blank\] page=\d+"
REASONS_BY_ERROR = {
    "exact": ({"message": MARKER}, "nothing"),
    "pattern": ({"message": "EARLY_EXIT[blank] page=12"}, "blank"),
    "signed": ({"signed": "proven"}, "proven"),
}
REASONS = ("nothing", "blank", "proven", "no_text", "no_items")
UNARY = ("scripted", "scripted_chain", "scripted_nested", "scripted_bls")
STREAMED = ("scripted_stream", "stream_chain", "stream_nested")
EMPTY = {"text": None, "numbers": []}


def pipelines() -> dict[str, Any]:
    """Returns the scripted pipelines, and the OCR pipelines of the reference, with longer timeouts."""
    inputs = {"script": {"tensor": "SCRIPT", "kind": "text"}}
    text = {"tensor": "TEXT", "kind": "text"}
    unary = {"outputs": {"text": text, "numbers": {"tensor": "NUMBERS"}}, "stream": True}
    unary["early_exit"] = rules("ALREADY_EXISTS", text="TEXT", list_="NUMBERS")
    streamed = {"outputs": {"text": text, "token_id": {"tensor": "TOKEN_ID"}}, "stream": {"commit_s": 0.3}}
    streamed["early_exit"] = rules("any", text="TEXT", list_="TOKEN_ID")
    by_model = dict.fromkeys(UNARY, unary) | dict.fromkeys(STREAMED, streamed)
    scripted = {name: {"model": name, "inputs": inputs, "timeout_s": 20, **spec} for name, spec in by_model.items()}
    reference = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]
    ocr = {name: reference[name] | {"timeout_s": 60} for name in ("ocr", "ocr_bls", "ocr_steps")}
    return scripted | {name: {key: spec[key] for key in spec if key != "sample"} for name, spec in ocr.items()}


def rules(code: str, *, text: str, list_: str) -> list[dict[str, Any]]:
    return [
        {"reason": "nothing", "error": {"code": code, "message": MARKER}},
        {"reason": "blank", "error": {"code": code, "message_pattern": PATTERN}},
        {"reason": "proven", "error": {"code": "any", "signed": True}},
        {"reason": "no_text", "missing": [text]},
        {"reason": "no_items", "empty": [list_]},
    ]


gateway = live_gateway(pipelines(), early_exit_key=EARLY_EXIT_KEY, drain_s="2")


def ask(client: httpx.Client, pipeline: str, **fields: Any) -> httpx.Response:
    return client.post(f"/v1/pipelines/{pipeline}", json={"script": json.dumps(fields)})


def error(**match: str) -> dict[str, str]:
    return {"code": "ALREADY_EXISTS", **match}


@pytest.mark.parametrize("pipeline", UNARY)
def test_errors_and_outputs_of_unary_models_are_exits_but_exceptions_are_not(
    client: httpx.Client, gateway: GatewayProcess, triton: EmbeddedTriton, pipeline: str
) -> None:
    before, tail_before = counted(gateway, pipeline), settled_executions(triton, "scripted_tail")
    for error_fields, reason in REASONS_BY_ERROR.values():
        answer = ask(client, pipeline, error=error(**error_fields))
        assert (answer.status_code, answer.json()) == (200, EMPTY | {"early_exit": reason})
        assert answer.headers["X-Early-Exit"] == reason
    assert settled_executions(triton, "scripted_tail") == tail_before
    complete = {"text": "hello", "numbers": [1.0, 2.0], "early_exit": None}
    assert ask(client, pipeline).json() == complete
    missing = ask(client, pipeline, omit=["TEXT"], numbers=[7])
    assert missing.json() == {"text": None, "numbers": [7.0], "early_exit": "no_text"}
    empty = ask(client, pipeline, numbers=[], text="kept")
    assert empty.json() == {"text": "kept", "numbers": [], "early_exit": "no_items"}
    texts = [MARKER, f"in ensemble 'scripted_chain', {MARKER}", f"{MARKER}\n", "a user's words"]
    for text in texts:
        answer = ask(client, pipeline, **{"raise": text})
        assert (answer.status_code, answer.json()["code"]) == (502, "model_error"), text
        assert text.strip() not in answer.text
    added = dict.fromkeys(REASONS, 1) | {"exceptions": len(texts)}
    assert counted(gateway, pipeline) == {name: before[name] + count for name, count in added.items()}


def counted(gateway: GatewayProcess, pipeline: str) -> dict[str, float]:
    """Returns the number of early exits for each reason, and the number of exceptions."""
    found = {reason: gateway.metric("early_exits_total", pipeline=pipeline, reason=reason) for reason in REASONS}
    return found | {"exceptions": gateway.metric("model_exceptions_total", pipeline=pipeline)}


@pytest.mark.parametrize("pipeline", STREAMED)
@pytest.mark.parametrize("outputs", [0, 2])
def test_an_error_ends_a_stream(client: httpx.Client, pipeline: str, outputs: int) -> None:
    empty, whole = {"text": "", "token_id": []}, {"text": "word ", "token_id": [0]}
    for error_fields, reason in REASONS_BY_ERROR.values():
        *written, last = read_stream(client, pipeline, script(outputs, error=error(**error_fields)))
        assert [event.data for event in written] == ([whole] * outputs or [empty])
        assert (last.data["reason"], last.data["early_exit"]) == ("early_exit", reason)
    joined = client.post(f"/v1/pipelines/{pipeline}", json=script(outputs, error=error(signed="proven")))
    assert joined.json() == {"text": "word " * outputs, "token_id": [0] * outputs, "early_exit": "proven"}


def script(outputs: int, **fields: Any) -> dict[str, str]:
    return {"script": json.dumps({"outputs": outputs, "interval_s": 0.02, "then": "error", **fields})}


async def read(gateway: GatewayProcess, pipeline: str, images: list[bytes]) -> list[dict[str, Any]]:
    """Sends concurrent requests. A busy machine refuses some of them, which are sent again."""

    async def answer_of(image: bytes) -> dict[str, Any]:
        while (answer := await session.post(f"/v1/pipelines/{pipeline}", files={"image": image})).status_code == 429:
            await asyncio.sleep(float(answer.headers["retry-after"]))
        return dict(answer.json())

    limits = httpx.Limits(max_connections=len(images))
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits) as session:
        return await asyncio.gather(*map(answer_of, images))


def picture_of(word: str) -> bytes:
    """Returns a small PNG that shows ``word``, which may be empty."""
    image = Image.new("L", (224, 64), 255)
    ImageDraw.Draw(image).text((16, 10), word, fill=0, font=ImageFont.load_default(36))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("pipeline", ["ocr", "ocr_bls", "ocr_steps"])
async def test_concurrent_images_get_their_own_texts_and_exits_skip_the_later_steps(
    gateway: GatewayProcess, triton: EmbeddedTriton, pytestconfig: pytest.Config, pipeline: str, count: int
) -> None:
    words = ("ANCHOR", "BRIDGE", "COPPER", "DRAGON", "FLOWER", "GARDEN", "HAMMER", "ISLAND")
    pictures = {word: picture_of(word) for word in ("", *words)}
    pictures["~"] = (Path(pytestconfig.rootpath) / "samples/scribble.png").read_bytes()
    unreadable = [], None if pipeline == "ocr" else "no_readable_text"
    expected = {"": ([], "no_text"), "~": unreadable} | {word: ([word], None) for word in words}
    sent = [words[index // 4 % 8] if index % 4 == 0 else "~" if index % 16 == 1 else "" for index in range(64)]
    answers = await read(gateway, pipeline, [pictures[word] for word in sent])
    for word, answer in zip(sent, answers, strict=True):
        assert (answer["texts"], answer["early_exit"]) == expected[word]
    before = {model: settled_executions(triton, model) for model in ("text_detect", "text_recognize")}
    for _ in range(count):
        (answer,) = await read(gateway, pipeline, [pictures[""]])
        assert answer["early_exit"] == "no_text"
    after = {model: settled_executions(triton, model) - earlier for model, earlier in before.items()}
    assert before["text_recognize"] > 0
    assert after == {"text_detect": count, "text_recognize": 0}


@pytest.mark.full
def test_an_embedded_triton_gets_the_early_exit_key(tmp_path: Path, models_venv: Path) -> None:
    settings = embedded(tmp_path, models_venv, ["scripted"], [])
    rule = {"reason": "proven", "error": {"code": "any", "signed": True}}
    (tmp_path / "gateway.yaml").write_text(
        json.dumps({"pipelines": {"p": {"model": "scripted", "early_exit": [rule]}}})
    )
    with running_gateway(tmp_path, **settings, early_exit_key="sixteen letters!") as process:
        body = {"SCRIPT": json.dumps({"error": error(signed="proven")})}
        assert httpx.post(f"{process.url}/v1/pipelines/p", json=body).json()["early_exit"] == "proven"
