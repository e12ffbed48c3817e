"""``/v1/embeddings`` over the preset of a vLLM backend with an embedding model."""

import json
from typing import Any

import httpx
import pytest

from app.core.errors import ModelError, UpstreamError
from app.core.inference import InferenceResponse
from tests.api.openai.conftest import refusal
from tests.toolkit.gateway import Served, gateway_fixture
from tests.toolkit.models import model, response, tensor

CONFIG = "pipelines: {embed: {model: model, preset: vllm_embeddings, warmup: false}}"
MODEL = model(
    ["text_input BYTES [1]", "embedding_request BYTES [1] optional", "return_num_input_tokens BOOL [1] optional"],
    ["text_output BYTES [-1]", "num_input_tokens UINT32 [1]"],
    decoupled=True,
)


def vector(text: bytes) -> InferenceResponse:
    return response(tensor("text_output", "BYTES", [text]), tensor("num_input_tokens", "UINT32", 3), is_final=True)


api = gateway_fixture(CONFIG, MODEL, answers=[vector(b"[0.5, 1]")])


async def embed(api: Served, **body: Any) -> httpx.Response:
    return await api.client.post("/v1/embeddings", json={"model": "embed", "input": "a"} | body)


def sent(api: Served) -> list[Any]:
    requests = [{each.name: each.array for each in request.inputs} for request in api.engine.requests]
    assert all(each["text_input"].item() == b"" for each in requests)
    return [json.loads(each["embedding_request"].item()) for each in requests]


async def test_a_text_is_a_request(api: Served) -> None:
    answer = (await embed(api)).json()
    assert (answer["data"][0]["embedding"], answer["usage"]["prompt_tokens"]) == ([0.5, 1.0], 3)
    assert sent(api) == [{"input": "a"}]


@pytest.mark.parametrize(
    ("given", "items"),
    [(["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), (["a", [4]], ["a", [4]])],
)
async def test_each_text_or_list_of_token_ids_is_a_request(api: Served, given: Any, items: list[Any]) -> None:
    answer = (await embed(api, input=given, dimensions=2)).json()
    assert len(answer["data"]) == len(items)
    assert answer["usage"]["total_tokens"] == 3 * len(items)
    expected = [{"input": each, "pooling_params": {"dimensions": [2]}} for each in items]
    assert sorted(map(str, sent(api))) == sorted(map(str, expected))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": [2]}, "dimensions"),
        ({"embedding_request": "{}"}, "embedding_request"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_invalid_requests_do_not_reach_the_model(api: Served, body: dict[str, Any], param: str) -> None:
    assert refusal(await embed(api, **body)) == (400, "invalid_input", param)
    assert api.engine.requests == []


@pytest.mark.parametrize("text", [b"{}", b"null", b"5", b'["a"]', b"[[1]]", b"no JSON"])
async def test_an_answer_that_is_no_vector_is_an_error(api: Served, text: bytes) -> None:
    api.engine.answers = [vector(text)]
    assert refusal(await embed(api))[:2] == (502, "contract_violation")


async def test_a_length_that_the_model_cannot_make_is_the_callers_error(api: Served) -> None:
    message = "Error generating stream: Model only supports [256] matryoshka dimensions"
    error = ModelError("Model 'model' failed.")
    error.upstream = UpstreamError(None, message)
    api.engine.answers = [error]
    assert refusal(await embed(api, dimensions=2)) == (400, "invalid_input", "dimensions")
