"""``/v1/embeddings``: texts in batches or, with vLLM, one by one; vectors as numbers or as base64."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from app.core.errors import ModelError, UpstreamError
from app.core.inference import InferenceResponse
from tests.api.openai.conftest import EMBEDDER, EMBEDS, Api, refusal
from tests.api.openai.test_fields import OF_EMBEDDINGS
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.models import refusal as refused_by_model
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
    answer = (await embed(api, input=texts, encoding_format="float")).json()
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
    text = (await embed(api, encoding_format="base64", dimensions=2, **OF_EMBEDDINGS)).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [np.float32(0.1), -2]


async def test_a_failed_batch_fails_the_request(api: Api) -> None:
    api.engine.answers = [ModelError("It failed.")]
    assert refusal(await embed(api, input=["a", "b"])) == (502, "model_error", None)


async def test_an_early_exit_is_an_empty_vector(api: Api) -> None:
    api.engine.answers = [refused_by_model("EXIT")]
    answer = await embed(api)
    assert answer.headers["x-early-exit"] == "nothing"
    assert answer.json()["data"] == [{"object": "embedding", "index": 0, "embedding": []}]


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


LISTED = """
pipelines:
  embed:
    model: embedder
    inputs: {text: {tensor: TEXT, kind: text, enum: [a, b]}}
    outputs: {embedding: {tensor: VECTOR}}
    openai: {embeddings: {}}
"""
listed = gateway_fixture(LISTED, EMBEDDER, answers=[vectors([0, 0], [1, 0])])


async def test_each_of_several_texts_must_fit_the_input(listed: Served) -> None:
    assert (await embed(listed, input=["a", "b"])).status_code == 200
    asked = len(listed.engine.requests)
    for texts, param in ((["a", "c"], "input[1]"), (["c", "a"], "input[0]"), (["c"], "input")):
        assert refusal(await embed(listed, input=texts)) == (400, "invalid_input", param)
    assert len(listed.engine.requests) == asked


CONFIG = "pipelines: {embed: {model: model, preset: vllm_embeddings, warmup: false}}"


def vector(text: bytes) -> InferenceResponse:
    return response(tensor("text_output", "BYTES", [text]), tensor("num_input_tokens", "UINT32", 3), is_final=True)


vllm = gateway_fixture(CONFIG, EMBEDS, answers=[vector(b"[0.5, 1]")])


def sent(vllm: Served) -> list[Any]:
    requests = [{each.name: each.array for each in request.inputs} for request in vllm.engine.requests]
    assert all(each["text_input"].item() == b"" for each in requests)
    return [json.loads(each["embedding_request"].item()) for each in requests]


async def test_a_text_is_a_request_to_vllm(vllm: Served) -> None:
    answer = (await embed(vllm)).json()
    assert (answer["data"][0]["embedding"], answer["usage"]["prompt_tokens"]) == ([0.5, 1.0], 3)
    assert sent(vllm) == [{"input": "a"}]


@pytest.mark.parametrize(
    ("given", "items"),
    [(["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), (["a", [4]], ["a", [4]])],
)
async def test_each_text_or_list_of_token_ids_is_a_request(vllm: Served, given: Any, items: list[Any]) -> None:
    answer = (await embed(vllm, input=given, dimensions=2)).json()
    assert len(answer["data"]) == len(items)
    assert answer["usage"]["total_tokens"] == 3 * len(items)
    expected = [{"input": each, "pooling_params": {"dimensions": [2]}} for each in items]
    assert sorted(map(str, sent(vllm))) == sorted(map(str, expected))


@pytest.mark.parametrize("text", [b"{}", b"null", b"5", b'["a"]', b"[[1]]", b"no JSON"])
async def test_an_answer_that_is_no_vector_is_an_error(vllm: Served, text: bytes) -> None:
    vllm.engine.answers = [vector(text)]
    assert refusal(await embed(vllm))[:2] == (502, "contract_violation")


async def test_a_length_that_the_model_cannot_make_is_the_callers_error(vllm: Served) -> None:
    message = "Error generating stream: Model only supports [256] matryoshka dimensions"
    error = ModelError("Model 'model' failed.")
    error.upstream = UpstreamError(None, message)
    vllm.engine.answers = [error]
    assert refusal(await embed(vllm, dimensions=2)) == (400, "invalid_input", "dimensions")
