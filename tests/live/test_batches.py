"""Requests with more items than the model takes at a time, with the real Triton: parts, joined answers, failures."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.toolkit.events import read_stream
from tests.toolkit.processes import GatewayProcess, live_gateway
from tests.toolkit.waiting import eventually

AT_ONCE = 4
"""``max_batch_size`` of the models."""
ROWS = {
    "model": "scripted_rows",
    "inputs": {"script": {"tensor": "SCRIPT", "kind": "text"}},
    "outputs": {"text": {"tensor": "TEXT", "kind": "text"}, "numbers": {"tensor": "NUMBERS"}},
}
EXITS = [
    {"reason": "nothing", "error": {"code": "ALREADY_EXISTS", "message": "EXIT"}},
    {"reason": "no_numbers", "missing": ["NUMBERS"]},
]
EXIT = {"error": {"code": "ALREADY_EXISTS", "message": "EXIT"}}


PIPELINES = {
    "rows": {**ROWS, "batch": {"max_items": 40}},
    "exit_of_each": {**ROWS, "batch": {"parts": 1}, "early_exit": EXITS},
    "words": {
        "model": "scripted_rows_stream",
        "inputs": {"script": {"tensor": "SCRIPT", "kind": "text"}},
        "outputs": {"text": {"tensor": "TEXT", "kind": "text"}, "number": {"tensor": "NUMBER"}},
        "early_exit": [{"reason": "nothing", "error": {"code": "any", "message": "EXIT"}}],
        "batch": {"max_items": 100},
        "stream": True,
    },
}


gateway = live_gateway(PIPELINES)


def ask(client: httpx.Client, pipeline: str, *scripts: dict[str, Any]) -> httpx.Response:
    return client.post(f"/v1/pipelines/{pipeline}", json={"script": [json.dumps(script) for script in scripts]})


def numbered(count: int, *, at: int = -1, **fields: Any) -> list[dict[str, Any]]:
    """Scripts for ``count`` items, where the item ``at`` has further fields."""
    return [{"text": f"item {i}", "number": i, **(fields if i == at else {})} for i in range(count)]


@pytest.mark.parametrize("count", [1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE, 39])
def test_the_answers_of_all_parts_are_joined_in_order(
    client: httpx.Client, gateway: GatewayProcess, tmp_path: Path, count: int
) -> None:
    before = gateway.metric("request_parts_total", pipeline="rows")
    scripts = [{**script, "journal": str(tmp_path / "journal")} for script in numbered(count)]
    answer = ask(client, "rows", *scripts)
    assert answer.status_code == 200
    assert answer.json() == {"text": [f"item {i}" for i in range(count)], "numbers": [[i, i] for i in range(count)]}
    whole, rest = divmod(count, AT_ONCE)
    sent = [f"{AT_ONCE} rows"] * whole + [f"{rest} rows"] * (rest > 0)
    assert Counter((tmp_path / "journal").read_text().splitlines()) == Counter(sent)
    counted = gateway.metric("request_parts_total", pipeline="rows") - before
    assert counted == (len(sent) if len(sent) > 1 else 0)


def test_a_failed_part_fails_the_request_names_its_items_and_cancels_the_others(
    client: httpx.Client, tmp_path: Path
) -> None:
    journal, failure = tmp_path / "journal", {"code": "INTERNAL", "message": "broken"}
    scripts = numbered(10, at=6, error=failure, sleep_s=0.3)
    scripts[0] |= {"sleep_s": 20, "journal": str(journal)}
    answer = ask(client, "rows", *scripts)
    assert (answer.status_code, answer.json()["code"]) == (502, "model_error")
    assert answer.json()["errors"] == [{"field": "items[4..7]", "problem": "failed"}]
    eventually(lambda: "cancelled" in journal.read_text())
    whole = ask(client, "rows", {"error": failure})
    assert (whole.status_code, "errors" in whole.json()) == (502, False)


def test_with_parts_of_one_each_item_has_its_own_exit(client: httpx.Client) -> None:
    scripts = numbered(5)
    scripts[1] |= EXIT
    scripts[3]["omit"] = ["NUMBERS"]
    assert ask(client, "exit_of_each", *scripts).json() == {
        "text": ["item 0", None, "item 2", "item 3", "item 4"],
        "numbers": [[0, 0], [], [2, 2], [], [4, 4]],
        "early_exit": [None, "nothing", None, "no_numbers", None],
    }


def words(*texts: str, **fields: Any) -> str:
    return json.dumps({"words": texts, **fields})


def test_each_item_of_a_stream_is_a_call_and_each_event_has_its_number(client: httpx.Client) -> None:
    scripts = [words(*[f"{i}-{k}" for k in range(i % 4)]) for i in range(12)] + [words(error="EXIT")]
    *outputs, last = read_stream(client, "words", {"script": scripts})
    for i in range(12):
        own = [event.data for event in outputs if event.data["index"] == i]
        assert own == [{"index": i, "text": f"{i}-{k}", "number": k} for k in range(i % 4)]
    assert {"index": 12, "text": "", "number": None} in [event.data for event in outputs]
    ends = [None] * 12 + ["nothing"]
    assert (last.name, last.data["reason"], last.data["early_exit"]) == ("done", "complete", ends)
    *_, last = read_stream(client, "words", {"script": [words("a"), words("b", error="broken"), words("c")]})
    assert (last.name, last.data["code"]) == ("error", "model_error")
    assert last.data["errors"] == [{"field": "items[1]", "problem": "failed"}]
