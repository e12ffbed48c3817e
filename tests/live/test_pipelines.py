"""The reference pipelines on the real Triton: a POST becomes a Triton call and returns the fields of the pipeline."""

import base64
import json
from pathlib import Path

import httpx
import pytest

LINES = ["Hello Triton gateway", "Open daily 9 to 18", "Please ring the bell"]


@pytest.fixture(scope="module")
def sign(pytestconfig: pytest.Config) -> bytes:
    return (Path(pytestconfig.rootpath) / "samples" / "sign.png").read_bytes()


@pytest.mark.parametrize("pipeline", ["ocr", "ocr_bls"])
def test_text_is_read_from_a_file_part_and_base64(client: httpx.Client, pipeline: str, sign: bytes) -> None:
    answer = client.post(f"/v1/pipelines/{pipeline}", files={"image": sign})
    assert answer.status_code == 200
    assert answer.json()["texts"] == LINES
    assert answer.json()["early_exit"] is None
    assert len(answer.json()["boxes"]) == len(answer.json()["scores"]) == len(LINES)
    answer = client.post(f"/v1/pipelines/{pipeline}", json={"image": base64.b64encode(sign).decode()})
    assert answer.json()["texts"] == LINES
    damaged = client.post(f"/v1/pipelines/{pipeline}", files={"image": sign[:200]})
    assert (damaged.status_code, damaged.json()["code"]) == (422, "invalid_input")


def test_write_joins_its_outputs(client: httpx.Client) -> None:
    body = {"prompt": "The for statement", "max_tokens": 12, "seed": 7}
    answer = client.post("/v1/pipelines/write", json=body)
    assert answer.status_code == 200
    assert isinstance(answer.json()["text"], str)
    assert 1 <= len(answer.json()["token_id"]) <= 12
    assert answer.json()["finish_reason"] in {"length", "stop"}
    assert client.post("/v1/pipelines/write", json=body).json() == answer.json()


def test_write_streams_token_by_token(client: httpx.Client) -> None:
    body = {"prompt": "The for statement", "max_tokens": 12, "seed": 7}
    with client.stream("POST", "/v1/pipelines/write/stream", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [frame.split("\n") for frame in answer.read().decode().split("\n\n") if frame]
    assert [event[0] for event in events] == [f"id: {index}" for index in range(1, len(events) + 1)]
    assert [event[1] for event in events] == ["event: output"] * (len(events) - 1) + ["event: done"]
    outputs = [json.loads(event[2].removeprefix("data: ")) for event in events]
    assert all(len(output["token_id"]) == 1 for output in outputs[:-1])
    assert outputs[-1]["reason"] == "complete"
    whole = client.post("/v1/pipelines/write", json=body).json()
    assert "".join(output["text"] for output in outputs[:-1]) == whole["text"]
