"""The reference pipelines on the real Triton, and insights: all compositions of its steps give the same answer."""

import asyncio
import base64
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.processes import ROOT, executions, settled_executions
from tests.toolkit.waiting import eventually

WITH_BOTH_HEADS = ["insights", "insights_direct", "insights_bls", "insights_steps"]
ALL = [*WITH_BOTH_HEADS, "insights_topic", "insights_sentiment"]
TOPICS = ["politics", "business", "sport", "technology", "science", "health", "travel", "food", "entertainment"]
TEXTS = {
    "The prime minister resigned after losing a confidence vote.": ("politics", None),
    "The goalkeeper saved a penalty in extra time, what a fantastic match!": ("sport", "positive"),
    "The curry was cold and the waiter was rude.": ("food", "negative"),
    "The museum is open from ten to six and two hours away by train.": ("travel", "neutral"),
}


def answer(client: httpx.Client, pipeline: str, text: str, **fields: object) -> dict[str, Any]:
    response = client.post(f"/v1/pipelines/{pipeline}", json={"text": text, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Compares answers up to rounding, because the last bit of a vector depends on the other texts of the batch."""
    return all(
        value == pytest.approx(second[name], abs=1e-5) if isinstance(value, list) else value == second[name]
        for name, value in first.items()
    )


@pytest.mark.parametrize("pipeline", WITH_BOTH_HEADS)
def test_the_labels_match_the_text_and_the_request_can_define_them(client: httpx.Client, pipeline: str) -> None:
    for text, (topic, sentiment) in TEXTS.items():
        found = answer(client, pipeline, text)
        assert found["topic"] == topic
        assert sentiment in (None, found["sentiment"])
    text = "The curry was cold and the waiter was rude."
    found = answer(client, pipeline, text, topics=["Gärten 🌻", "restaurants"], sentiments=["angry", "happy", "afraid"])
    assert (found["topic"], len(found["topic_scores"])) == ("restaurants", 2)
    assert (found["sentiment"], len(found["sentiment_scores"])) == ("angry", 3)


@pytest.mark.parametrize("text", [*TEXTS, "", " ", "Grüße, 你好 🐍\u0000", "word salad " * 20_000])
def test_every_variant_gives_the_same_answer(client: httpx.Client, text: str) -> None:
    whole = answer(client, "insights", text)
    assert len(whole["topic_scores"]) == len(TOPICS)
    assert whole["topic"] == TOPICS[whole["topic_scores"].index(max(whole["topic_scores"]))]
    assert sum(whole["sentiment_scores"]) == pytest.approx(1, abs=1e-5)
    for pipeline in ALL:
        assert same(answer(client, pipeline, text), whole), pipeline


@pytest.mark.parametrize(("pipeline", "skipped"), [("insights_topic", "sentiment"), ("insights_sentiment", "topic")])
def test_a_pipeline_with_one_head_skips_the_other_head(
    client: httpx.Client, triton: EmbeddedTriton, pipeline: str, skipped: str
) -> None:
    before = settled_executions(triton, f"head_{skipped}")
    for _ in range(10):
        assert skipped not in answer(client, pipeline, "The dog is in the garden.")
    assert settled_executions(triton, f"head_{skipped}") == before
    answer(client, "insights", "The dog is in the garden.")
    eventually(lambda: executions(triton, f"head_{skipped}") == before + 1)


async def test_a_refused_request_does_not_affect_its_batch(gateway: Any) -> None:
    bodies = [{"text": "The goalkeeper saved a penalty.", "topics": TOPICS if n % 3 else []} for n in range(60)]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as many:
        answers = await asyncio.gather(*(many.post("/v1/pipelines/insights_bls", json=body) for body in bodies))
    assert [each.status_code for each in answers] == [200 if n % 3 else 422 for n in range(60)]
    assert {each.json()["topic"] for each in answers if each.status_code == 200} == {"sport"}


def test_a_bls_model_rejects_a_parameter_that_it_cannot_forward(client: httpx.Client) -> None:
    given = {"TEXT": ["a"], "TOPICS": ["b", "c"], "SENTIMENTS": ["d", "e"]}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1, len(data)], "data": data} for name, data in given.items()
    ]
    for value, status in ((1, 200), ("x", 200), (0.5, 400)):
        body = {"inputs": inputs, "parameters": {"own": value}}
        response = client.post("/v2/models/insights_bls/infer", json=body)
        assert response.status_code == status, response.text


LINES = ["Hello Triton gateway", "Open daily 9 to 18", "Please ring the bell"]


@pytest.mark.parametrize("pipeline", ["ocr", "ocr_bls", "ocr_steps"])
def test_text_is_read_from_a_file_part_and_base64(client: httpx.Client, pipeline: str) -> None:
    sign = (ROOT / "samples" / "sign.png").read_bytes()
    answer = client.post(f"/v1/pipelines/{pipeline}", files={"image": sign})
    assert answer.status_code == 200
    assert answer.json()["texts"] == LINES
    assert answer.json()["early_exit"] is None
    assert len(answer.json()["boxes"]) == len(answer.json()["scores"]) == len(LINES)
    answer = client.post(f"/v1/pipelines/{pipeline}", json={"image": base64.b64encode(sign).decode()})
    assert answer.json()["texts"] == LINES
    damaged = client.post(f"/v1/pipelines/{pipeline}", files={"image": sign[:200]})
    assert (damaged.status_code, damaged.json()["code"]) == (422, "invalid_input")
