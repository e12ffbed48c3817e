"""``/v1/embeddings``: texts in batches, vectors as numbers or as base64."""

import base64
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from app.core.errors import ModelError
from tests.api.openai.conftest import Api, refusal
from tests.toolkit.models import response, tensor


def vectors(*rows: Sequence[float]) -> Any:
    return response(tensor("VECTOR", "FP32", rows), tensor("TOKENS", "INT32", [[3]] * len(rows)))


async def embed(api: Api, **body: Any) -> httpx.Response:
    return await api.client.post("/v1/embeddings", json={"model": "embed", "input": "a"} | body)


async def test_an_embedding_of_one_text(api: Api) -> None:
    api.engine.answers = [vectors([0.5, 1])]
    assert (await embed(api)).json() == {
        "object": "list",
        "model": "embed",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}],
    }
    assert api.engine.requests[0].inputs[0].array.tolist() == [[b"a"]]


async def test_texts_are_sent_in_batches_and_answered_in_order(api: Api) -> None:
    api.engine.answers = [vectors([0, 0], [1, 0], [2, 0], [3, 0])]
    texts = [f"text {index}" for index in range(8)]
    answer = (await embed(api, input=texts)).json()
    assert [(item["index"], item["embedding"][0]) for item in answer["data"]] == [
        (index, index % 4) for index in range(8)
    ]
    sent = [request.inputs[0].array for request in api.engine.requests]
    assert [array.shape for array in sent] == [(4, 1), (4, 1)]
    assert [item.decode() for array in sent for item in array.flat] == texts
    assert len({request.request_id for request in api.engine.requests}) == 2
    assert answer["usage"]["total_tokens"] == 24


async def test_base64_encodes_32_bit_floats(api: Api) -> None:
    api.engine.answers = [vectors([0.1, -2])]
    text = (await embed(api, encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [np.float32(0.1), -2]


async def test_dimensions_must_match_the_model(api: Api) -> None:
    api.engine.answers = [vectors([0, 0])]
    assert (await embed(api, dimensions=2)).status_code == 200
    assert refusal(await embed(api, dimensions=3)) == (400, "invalid_input", "dimensions")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": [[1, 2]]}, "input"),
        ({"input": None}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"user": 5}, "user"),
        ({"seed": 1}, "seed"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_invalid_requests_are_400(api: Api, body: dict[str, Any], param: str) -> None:
    status, code, found = refusal(await embed(api, **body))
    assert (status, code) == (400, "invalid_input")
    assert str(found).startswith(param)


async def test_a_failed_batch_fails_the_request(api: Api) -> None:
    api.engine.answers = [ModelError("It failed.")]
    assert refusal(await embed(api, input=["a", "b"])) == (502, "model_error", None)


@pytest.mark.parametrize("rows", [[[0, 0]], [[0, 0]] * 3, [[0, 0, 0]] * 2], ids=["too few", "too many", "too long"])
async def test_a_wrong_shape_violates_the_contract(api: Api, rows: list[list[float]]) -> None:
    api.engine.answers = [vectors(*rows)]
    assert refusal(await embed(api, input=["a", "b"])) == (502, "contract_violation", None)


@pytest.mark.parametrize(
    ("texts", "vector", "tokens"),
    [
        (["a"], [0.5, 1], [3]),
        (["a"], [[0.5, 1]], 3),
        (["a"], [[[0.5, 1]]], [[[3]]]),
        (["a", "b"], [[0.5, 1], [0.5, 1]], [3, 3]),
        (["a", "b"], [[[0.5, 1], [0.5, 1]]], [[3], [3]]),
    ],
    ids=str,
)
async def test_dimensions_of_size_1_may_be_missing_or_extra(
    api: Api, texts: list[str], vector: Any, tokens: Any
) -> None:
    api.engine.answers = [response(tensor("VECTOR", "FP64", vector), tensor("TOKENS", "INT64", tokens))]
    answer = (await embed(api, input=texts)).json()
    assert [each["embedding"] for each in answer["data"]] == [[0.5, 1.0]] * len(texts)
    assert answer["usage"]["total_tokens"] == 3 * len(texts)


async def test_a_text_model_has_no_embeddings(api: Api) -> None:
    assert refusal(await embed(api, model="write")) == (404, "model_not_found", None)
