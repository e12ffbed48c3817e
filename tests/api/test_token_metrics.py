"""The tokens of language models in the metrics, whatever address the caller uses."""

import asyncio

from tests.api.openai.test_backends import CONFIG, HELLO, VLLM, chat, complete
from tests.toolkit.gateway import Served, gateway_fixture

api = gateway_fixture(CONFIG, VLLM, answers=HELLO)


async def tokens(api: Served) -> tuple[float, float, float]:
    """The tokens of prompts, the tokens of answers, and the streams whose time for a token was measured."""
    await asyncio.sleep(0)
    names = ("prompt_tokens_total", "completion_tokens_total", "time_per_output_token_seconds_count")
    registry = api.gateway.inference.metrics.registry
    first, second, third = (
        registry.get_sample_value(f"triton_gateway_{name}", {"pipeline": "llama"}) or 0 for name in names
    )
    return first, second, third


async def test_whole_answers_and_streams_are_counted(api: Served) -> None:
    await chat(api)
    assert await tokens(api) == (7, 3, 0)
    await complete(api, stream=True)
    assert await tokens(api) == (14, 6, 1)
    await api.client.post("/v1/pipelines/llama", json={"prompt": "Hi"})
    assert await tokens(api) == (21, 9, 1)
    await api.client.post("/v1/pipelines/llama/stream", json={"prompt": "Hi"})
    assert await tokens(api) == (28, 12, 2)
    await chat(api, n=2)
    assert await tokens(api) == (35, 18, 2)


async def test_a_refused_request_has_no_tokens(api: Served) -> None:
    await chat(api, temperature=9)
    assert await tokens(api) == (0, 0, 0)
