"""OpenAI's Python client reads completions of the real Triton, and errors."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.side_by_side import triton_text
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.waiting import eventually

PROMPT = "The for statement"
SAMPLING: dict[str, Any] = {"max_tokens": 24, "seed": 7, "temperature": 0.8}


@pytest.fixture(scope="module")
def sdk(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def pipeline_answer(client: httpx.Client, pipeline: str, **body: Any) -> Any:
    """Returns the answer of ``/v1/pipelines/{pipeline}``."""
    return client.post(f"/v1/pipelines/{pipeline}", json=body).raise_for_status().json()


def test_a_completion_matches_triton_whole_and_in_chunks(sdk: openai.OpenAI, triton: EmbeddedTriton) -> None:
    assert [model.id for model in sdk.models.list()] == ["write", "embed", "scripted_stream"]
    expected = triton_text(triton.http_url, PROMPT)
    answer = sdk.completions.create(model="write", prompt=PROMPT, **SAMPLING)
    assert answer.usage is not None
    tokens = {"prompt": answer.usage.prompt_tokens, "completion": answer.usage.completion_tokens}
    assert {"text": answer.choices[0].text, **tokens} == expected
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(sdk.completions.create(model="write", prompt=PROMPT, **options, **SAMPLING))
    assert text_of(chunks) == expected["text"]
    assert len(chunks) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage


def test_the_client_raises_an_error_of_a_stream(sdk: openai.OpenAI) -> None:
    script = json.dumps({"outputs": 2, "interval_s": 0.05, "then": "error"})
    texts = []
    with pytest.raises(openai.APIError) as caught:
        texts.extend(
            chunk.choices[0].text
            for chunk in sdk.completions.create(model="scripted_stream", prompt=script, stream=True)
        )
    assert caught.value.code == "model_error"
    assert type(caught.value) is openai.APIError


@pytest.mark.parametrize("stream", [False, True])
def test_stop_ends_the_text(sdk: openai.OpenAI, client: httpx.Client, stream: bool) -> None:
    sampling = {"max_tokens": 500, "seed": 3, "temperature": 1.0}
    full = pipeline_answer(client, "write", prompt=PROMPT, **{**sampling, "max_tokens": 40})["text"]
    stop = full[21:27]
    answer = sdk.completions.create(model="write", prompt=PROMPT, stop=["never", stop], stream=stream, **sampling)
    chunks = [answer] if isinstance(answer, openai.types.Completion) else list(answer)
    assert text_of(chunks) == full[: full.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_client_does_not_retry_a_model_error(gateway: GatewayProcess) -> None:
    """The client retries statuses from 500, unless the header X-Should-Retry is false."""
    labels = {"pipeline": "scripted_stream", "outcome": "model_error"}
    before = gateway.metric("requests_total", **labels)
    script = json.dumps({"outputs": 0, "then": "error"})
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=2) as sdk,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        sdk.completions.create(model="scripted_stream", prompt=script)
    assert (caught.value.status_code, caught.value.code) == (502, "model_error")
    eventually(lambda: gateway.metric("requests_total", **labels) == before + 1)


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)
