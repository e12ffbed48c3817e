"""Conversations and schemas that are meant to take much time or memory are refused or bounded.

Each test prints its time and the growth of the process's memory (``pytest -s``). ``test_template.py`` has the
templates.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from app.api.openai.choices import MAX_CHECKED_CHARACTERS, AnswerReader, Piece
from app.api.openai.tools import ToolUse
from app.core.errors import ToolCallMissing
from app.llm.answer_formats import parser_of
from app.llm.answer_schema import AnswerSchema
from tests.api.openai.conftest import refusal
from tests.api.openai.test_response_format import CHECKED, schema_of
from tests.api.openai.test_tools import ASKED, WEATHER, Gateways, chat, gateways, message_of, steps_of
from tests.toolkit.waiting import PATIENCE_S

__all__ = ["gateways"]
MIB = 1024 * 1024
full = pytest.mark.full


@contextmanager
def bounded(name: str, *, seconds: float, mebibytes: float) -> Iterator[None]:
    process = psutil.Process()
    before, began = process.memory_info().rss, time.process_time()
    yield
    took, growth = time.process_time() - began, (process.memory_info().rss - before) / MIB
    sys.stdout.write(f"\n| {name} | {took:.2f} s | {growth:.1f} MiB |\n")
    assert took < seconds
    assert growth < mebibytes


@pytest.mark.parametrize("count", [16_384, pytest.param(24_000, marks=full)])
async def test_many_messages_are_refused(gateways: Gateways, count: int) -> None:
    api = await gateways.of()
    with bounded(f"{count} messages", seconds=5, mebibytes=64):
        answered = await chat(api, messages=[{"role": "user", "content": "Hi"}] * count)
    assert refusal(answered) == (400, "invalid_input", "messages")


@pytest.mark.parametrize("megabytes", [1, pytest.param(10, marks=full)])
async def test_large_arguments_of_a_call(gateways: Gateways, megabytes: int) -> None:
    api = await gateways.of()
    function = {"name": "weather", "arguments": json.dumps({"city": "x" * megabytes * 1_000_000})}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    api.engine.answers = steps_of("vllm", "Hello")
    with bounded(f"{megabytes} MB of arguments", seconds=5, mebibytes=16 * megabytes + 16):
        answered = await chat(api, messages=[*ASKED, call])
    assert message_of(answered)["content"] == "Hello"


@pytest.mark.parametrize("mebibytes", [2, pytest.param(64, marks=full)])
@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize(
    "start",
    ['<tool_call>\n{"name": "weather", "arguments": {"city": "', "<tool_call>\n", "<tool_call>\n{"],
    ids=["arguments", "nothing", "object"],
)
def test_a_call_that_never_ends_keeps_little(start: str, mebibytes: int, is_required: bool) -> None:
    parser = parser_of("hermes", {"weather": WEATHER}, None, "")
    assert parser is not None
    reader = AnswerReader(parser, ToolUse(is_required=is_required))
    reader.add(start, Piece())
    name = f"{mebibytes} MiB of a call, required: {is_required}, after {start[-12:]!r}"
    with bounded(name, seconds=2 * mebibytes + 5, mebibytes=16):
        for _ in range(mebibytes * MIB // 1024):
            reader.add("x" * 1024, Piece())
    if is_required and "city" in start:
        assert mebibytes * MIB > MAX_CHECKED_CHARACTERS
        with pytest.raises(ToolCallMissing, match="too large to be checked"):
            reader.check("stop")


def links(count: int, of: str) -> dict[str, Any]:
    """Each definition refers to the next one twice."""
    parts: dict[str, Any] = {f"a{each}": {of: [{"$ref": f"#/$defs/a{each + 1}"}] * 2} for each in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{count}": {"type": "string"}}}


def nested(levels: int, of: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {of: [schema]}
    return schema


HOSTILE = {
    "anyOf by references": links(100, "anyOf"),
    "allOf by references": links(1000, "allOf"),
    "a cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "3,000 references in a row": {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{each}": {"$ref": f"#/$defs/a{each + 1}"} for each in range(3000)} | {"a3000": {}},
    },
    "100,000 properties": {"properties": {f"p{each}": {} for each in range(100_000)}},
    "200 levels of anyOf": nested(200, "anyOf"),
    "patterns that explode": {"pattern": "(((a{1000}){1000}){1000}){1000}"},
    "1,000 patterns": {"anyOf": [{"pattern": "[01]*1[01]{500}[^01]"}] * 1000},
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_schema_that_explodes_is_refused(gateways: Gateways, name: str) -> None:
    api = await gateways.of(preset=CHECKED)
    with bounded(name, seconds=3, mebibytes=64):
        answered = await chat(api, response_format=schema_of(HOSTILE[name]))
    assert refusal(answered)[1] in ("invalid_input", "invalid_json", "payload_too_large")
    assert not api.engine.requests


async def test_a_pattern_that_backtracks_takes_linear_time(gateways: Gateways) -> None:
    api = await gateways.of(preset=CHECKED)
    text = json.dumps("a" * 10_000 + "!")
    api.engine.answers = steps_of(CHECKED, text)
    with bounded("a pattern that backtracks", seconds=3, mebibytes=64):
        answered = await chat(api, response_format=schema_of({"pattern": "^(a|aa|a?)+$"}))
    assert refusal(answered)[:2] == (502, "response_format_mismatch")


async def test_a_long_check_does_not_stop_other_requests(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered, check = threading.Event(), threading.Event(), AnswerSchema.problem_of

    def waiting(schema: AnswerSchema, text: str) -> str | None:
        begun.set()
        assert answered.wait(PATIENCE_S)
        return check(schema, text)

    monkeypatch.setattr(AnswerSchema, "problem_of", waiting)
    api = await gateways.of(preset=CHECKED)
    api.engine.answers = steps_of(CHECKED, json.dumps(["x"] * 200))
    schema = {"type": "array", "items": {"$ref": "#/$defs/a0"}, "$defs": links(7, "allOf")["$defs"]}
    with bounded("a long check", seconds=5, mebibytes=64):
        checking = asyncio.create_task(chat(api, response_format=schema_of(schema)))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        assert (await api.client.get("/v1/models")).status_code == 200
        answered.set()
        assert message_of(await checking)["content"]
