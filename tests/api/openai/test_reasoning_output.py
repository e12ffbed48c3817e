"""The output ``reasoning`` of a chat pipeline under ``/v1/pipelines``, over the presets of LLM backends."""

from typing import Any

import jsonschema
import pytest

from tests.api.conftest import events
from tests.api.openai.conftest import Gateways, pieces_of, steps_of
from tests.toolkit.gateway import Served

PRESETS = ["vllm", "tensorrt_llm", "tensorrt_llm_api"]
LLAMA = "/v1/pipelines/llama"
ASKED = "Hi<think>"
ANSWER = "Hm, é.\n</think>\n\nYes. "


async def whole(api: Served, prompt: str = ASKED) -> Any:
    answered = await api.client.post(LLAMA, json={"prompt": prompt})
    assert answered.status_code == 200, answered.text
    return answered.json()


async def streamed(api: Served, prompt: str = ASKED) -> list[Any]:
    answered = await api.client.post(f"{LLAMA}/stream", json={"prompt": prompt})
    return [data for _, name, data in events(answered) if name == "output"]


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("preset", PRESETS)
async def test_the_reasoning_is_an_output_of_its_own(gateways: Gateways, preset: str, size: int) -> None:
    api = await gateways.of("null", preset, "qwen3", says=pieces_of(ANSWER, size))
    answer = await whole(api)
    assert (answer["reasoning"], answer["text"]) == ("Hm, é.", "Yes. ")
    outputs = await streamed(api)
    assert "".join(each["reasoning"] for each in outputs) == "Hm, é."
    assert "".join(each["text"] for each in outputs) == "Yes. "


async def test_the_end_of_the_prompt_decides_where_the_answer_begins(gateways: Gateways) -> None:
    api = await gateways.of("null", reasoning="deepseek_r1", says=pieces_of("Yes. No."))
    assert (await whole(api, "Hi"))["reasoning"] == "Yes. No."
    answer = await whole(api, "Hi<think>\n\n</think>\n")
    assert (answer["reasoning"], answer["text"]) == ("", "Yes. No.")


async def test_the_channels_of_gpt_oss(gateways: Gateways) -> None:
    api = await gateways.of("gpt_oss", reasoning="gpt_oss")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    api.engine.answers = steps_of("vllm", *pieces_of(text))
    answer = await whole(api)
    assert (answer["reasoning"], answer["text"]) == ("Hm.", "Yes.")


async def test_without_reasoning_the_text_stays_whole(gateways: Gateways) -> None:
    api = await gateways.of("null", says=[ANSWER])
    answer = await whole(api)
    assert answer["text"] == ANSWER
    assert "reasoning" not in answer


async def test_the_schemas_and_the_description_have_the_output(gateways: Gateways) -> None:
    api = await gateways.of("null", reasoning="qwen3", says=pieces_of(ANSWER))
    document = (await api.client.get("/openapi.json")).json()
    result = document["components"]["schemas"]["llama_result"]
    assert "reasoning" in result["required"]
    jsonschema.validate(await whole(api), {"components": document["components"], **result})
    described = (await api.client.get(LLAMA)).json()["outputs"]
    assert "reasoning" in [each["name"] for each in described]
