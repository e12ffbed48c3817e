"""OpenAI's fields over the presets of LLM backends."""

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.errors import ModelError, UpstreamError
from app.llm.tokenizer import TokenCounter
from tests.api.openai.conftest import ask, chunks, refusal, sampling, step
from tests.pipelines.test_presets import LLM_API, VLLM
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.models import response, tensor

CONFIG = """
pipelines:
  llama:
    model: model
    preset: vllm
    warmup: false
    adapters: {french: {lora_name: fr-v2}}
    openai: {chat: {template_text: "{{ messages[0].content }}"}}
"""


HELLO = [step(b"Hel"), step(b"lo", reason=b"length", count=2, is_final=True)]


api = gateway_fixture(CONFIG, VLLM, answers=HELLO)


async def complete(api: Served, **body: Any) -> httpx.Response:
    return await api.client.post("/v1/completions", json={"model": "llama", "prompt": "Hi"} | body)


async def test_usage_is_the_sum_of_the_counts(api: Served) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    answer = (await ask(api)).json()
    assert (answer["usage"], answer["choices"][0]["finish_reason"]) == (usage, "length")
    *_, last, _done = chunks(await ask(api, stream=True, stream_options={"include_usage": True}))
    assert last["usage"] == usage


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"include_stop_str_in_output": 1, "stop": "l"}, "include_stop_str_in_output"),
        ({"adapter": "french"}, "adapter"),
        ({"lora_name": "x"}, "lora_name"),
        ({"foo": 1}, "foo"),
    ],
)
async def test_a_wrong_field_never_reaches_the_backend(api: Served, body: Any, param: str) -> None:
    assert refusal(await ask(api, **body)) == (400, "invalid_input", param)
    assert api.engine.requests == []


async def test_max_completion_tokens_precede_max_tokens(api: Served) -> None:
    assert (await ask(api, max_tokens=100, max_completion_tokens=1)).status_code == 200
    assert sampling(api)["max_tokens"] == 1


async def test_the_text_may_end_with_the_stop_text(api: Served) -> None:
    answer = (await ask(api, stop=["l"], include_stop_str_in_output=True)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Hel", "stop")
    assert sampling(api)["include_stop_str_in_output"] is True


class TestSeveralChoices:
    async def test_each_choice_is_a_request_with_a_seed_of_its_own(self, api: Served) -> None:
        answer = (await complete(api, n=3, seed=10)).json()
        assert [(each["index"], each["text"]) for each in answer["choices"]] == [
            (0, "Hello"),
            (1, "Hello"),
            (2, "Hello"),
        ]
        assert sorted(sampling(api, index)["seed"] for index in range(3)) == [10, 11, 12]
        assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}

    async def test_without_a_seed_the_backend_chooses(self, api: Served) -> None:
        assert (await complete(api, n=2)).status_code == 200
        assert ["seed" in sampling(api, index) for index in range(2)] == [False, False]

    async def test_the_chunks_name_their_choice(self, api: Served) -> None:
        *events, last, _done = chunks(await ask(api, n=2, stream=True, stream_options={"include_usage": True}))
        for index in range(2):
            own = [each for event in events for each in event["choices"] if each["index"] == index]
            assert "".join(each["delta"].get("content", "") for each in own) == "Hello"
            assert [each["delta"].get("role") for each in own] == ["assistant"] + [None] * (len(own) - 1)
            assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]
        assert last["usage"]["completion_tokens"] == 6

    async def test_a_stop_text_ends_only_its_own_choice(self, api: Served) -> None:
        choices = (await complete(api, n=2, stop="l")).json()["choices"]
        assert [(each["text"], each["finish_reason"]) for each in choices] == [("He", "stop"), ("He", "stop")]

    async def test_one_failing_choice_fails_the_request(self, api: Served) -> None:
        error = ModelError("Model 'model' failed.")
        api.engine.answers = [step(b"He"), error]
        assert (await complete(api, n=2)).status_code == 502
        assert api.engine.closed == 2


class TestEcho:
    async def test_the_prompt_precedes_the_text(self, api: Served) -> None:
        assert (await complete(api, echo=True)).json()["choices"][0]["text"] == "HiHello"
        first, *_ = chunks(await complete(api, echo=True, stream=True))
        assert first["choices"][0]["text"] == "HiHel"

    async def test_the_prompt_is_not_searched_for_stop_texts(self, api: Served) -> None:
        assert (await complete(api, echo=True, prompt="lo", stop="lo")).json()["choices"][0]["text"] == "loHel"

    async def test_the_prompt_has_no_log_probabilities(self, api: Served) -> None:
        """Tools that score texts ask for both, and would take those of the answer for those of the prompt."""
        assert refusal(await complete(api, echo=True, logprobs=1)) == (400, "invalid_input", "echo")


TOKEN = {
    "11": {"logprob": -0.5, "rank": 2, "decoded_token": "Hel"},
    "12": {"logprob": -0.25, "rank": 1, "decoded_token": "Hol"},
}


class TestLogprobs:
    async def test_chat_has_the_tokens_with_their_alternatives(self, api: Served) -> None:
        api.engine.answers = [step(b"Hel", logprobs=[TOKEN], reason=b"stop", is_final=True)]
        choice = (await ask(api, logprobs=True, top_logprobs=1)).json()["choices"][0]
        hol = {"token": "Hol", "logprob": -0.25, "bytes": [72, 111, 108]}
        hel = {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": [hol]}
        assert choice["logprobs"] == {"content": [hel], "refusal": None}
        assert sampling(api)["logprobs"] == 1

    async def test_completions_have_lists(self, api: Served) -> None:
        api.engine.answers = [
            step(b"Hel", logprobs=[TOKEN]),
            step(b"lo", logprobs=[{"3": {"logprob": None, "decoded_token": "lo"}}], reason=b"stop", is_final=True),
        ]
        choice = (await complete(api, logprobs=2)).json()["choices"][0]
        assert choice["logprobs"] == {
            "tokens": ["Hel", "lo"],
            "token_logprobs": [-0.5, -9999.0],
            "top_logprobs": [{"Hel": -0.5, "Hol": -0.25}, {"lo": -9999.0}],
            "text_offset": [0, 3],
        }

    async def test_each_chunk_has_its_own_tokens(self, api: Served) -> None:
        api.engine.answers = [step(b"Hel", logprobs=[TOKEN]), step(b"", logprobs=[], reason=b"stop", is_final=True)]
        first, last, _done = chunks(await ask(api, logprobs=True, stream=True))
        assert [each["token"] for each in first["choices"][0]["logprobs"]["content"]] == ["Hel"]
        assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]

    async def test_without_the_field_there_are_none(self, api: Served) -> None:
        assert (await ask(api)).json()["choices"][0]["logprobs"] is None
        assert "logprobs" not in sampling(api)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_they_are_null_if_the_model_has_none(self, api: Served, *, stream: bool) -> None:
        for answer in (
            await complete(api, logprobs=0, stream=stream),
            await ask(api, logprobs=True, stream=stream),
        ):
            assert answer.status_code == 200, answer.text
            events = chunks(answer)[:-1] if stream else [answer.json()]
            assert [event["choices"][0]["logprobs"] for event in events] == [None] * len(events)

    async def test_tokens_in_another_form_are_a_violation(self, api: Served) -> None:
        api.engine.answers = [step(b"Hel", logprobs=[["Hel", -0.5]], reason=b"stop", is_final=True)]
        assert (await ask(api, logprobs=True)).status_code == 502


class TestAdapters:
    async def test_an_adapter_is_a_model(self, api: Served) -> None:
        models = (await api.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in models] == ["llama", "llama:french"]
        assert (await api.client.get("/v1/models/llama:french")).json()["id"] == "llama:french"
        answer = (await ask(api, model="llama:french")).json()
        assert (answer["model"], sampling(api)["lora_name"]) == ("llama:french", "fr-v2")

    async def test_an_unknown_adapter_is_an_unknown_model(self, api: Served) -> None:
        answer = await ask(api, model="llama:latin")
        assert refusal(answer)[:2] == (404, "model_not_found")
        assert api.engine.requests == []


GRAMMAR = "Grammar error: Invalid type: nonsense"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("text", "body", "code", "param"),
    [
        (
            "The decoder prompt (length 4001) is longer than the maximum model length of 512",
            {},
            "context_length_exceeded",
            "messages",
        ),
        ("'NoneType' object has no attribute 'lora_name'", {"min_tokens": 6, "max_tokens": 5}, "invalid_input", None),
        (GRAMMAR, {"response_format": {"type": "json_object"}}, "invalid_input", "response_format"),
        (GRAMMAR, {"tools": TOOLS, "tool_choice": "required"}, "invalid_input", "tools"),
    ],
    ids=["long_prompt", "parameters_that_do_not_fit", "schema_of_a_format", "schema_of_tools"],
)
async def test_what_the_backend_refuses_is_the_callers_error(
    tmp_path: Path, text: str, body: Any, code: str, param: str | None
) -> None:
    error = ModelError("Model 'model' failed.")
    error.upstream = UpstreamError(None, f"Error generating stream: {text}")
    (tmp_path / "gateway.yaml").write_text(f"{CONFIG.rstrip().removesuffix('}')}, tools: hermes}}\n")
    async with served(FakeEngine.of(VLLM, answers=[error]), tmp_path / "gateway.yaml") as api:
        assert refusal(await ask(api, **body)) == (400, code, param)


TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "Hi": 1, "there": 2}, "unk_token": "[UNK]"},
    "pre_tokenizer": {"type": "Whitespace"},
}


@pytest.fixture
async def counting(tmp_path: Path) -> AsyncIterator[Served]:
    """A backend that counts no tokens, with a folder of tokenizers and no gateway.yaml."""
    folder = tmp_path / "tokenizers" / "model"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    answers = [
        response(
            tensor("text_output", "BYTES", [text]), tensor("finish_reason", "BYTES", [why]), is_final=why != b"None"
        )
        for text, why in ((b"Hi", b"None"), (b"Hi there you", b"stop"))
    ]
    async with served(FakeEngine.of(LLM_API, answers=answers), None, tokenizers=folder.parent) as gateway:
        yield gateway


async def test_the_tokenizer_counts_what_the_backend_does_not(counting: Served) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    answer = (await ask(counting, model="model")).json()
    assert (answer["choices"][0]["message"]["content"], answer["usage"]) == ("Hi there you", usage)
    *_, last, _done = chunks(await ask(counting, model="model", stream=True, stream_options={"include_usage": True}))
    assert last["usage"] == usage


async def test_large_texts_are_counted_in_a_thread(counting: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, str] = {}
    count = TokenCounter.__call__

    def counted(self: TokenCounter, text: str, **options: Any) -> int:
        threads[len(text)] = threading.current_thread().name
        return count(self, text, **options)

    monkeypatch.setattr(TokenCounter, "__call__", counted)
    large = "there " * 3000
    counting.engine.answers = [
        response(tensor("text_output", "BYTES", [large.encode()]), tensor("finish_reason", "BYTES", [b"stop"]))
    ]
    messages = [{"role": "user", "content": large + "you"}]
    answer = (await ask(counting, model="model", messages=messages)).json()
    assert answer["usage"] == {"prompt_tokens": 3001, "completion_tokens": 3000, "total_tokens": 6001}
    assert threads.keys() == {len(large), len(large) + 3}
    assert threading.main_thread().name not in threads.values()


async def test_the_tokenizer_counts_the_reasoning(tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}<think>"}))
    config = "pipelines: {model: {model: model, preset: vllm, warmup: false, openai: {chat: {tokenizer: qwen}"
    (tmp_path / "gateway.yaml").write_text(f"{config}, reasoning: qwen3}}}}}}\n")
    answers = [step(b"there Hi"), step(b"</think>"), step(b" Hi", reason=b"stop", is_final=True)]
    async with served(FakeEngine.of(VLLM, answers=answers), tmp_path / "gateway.yaml") as api:
        answer = (await ask(api, model="model")).json()
        *_, last, _done = chunks(await ask(api, model="model", stream=True, stream_options={"include_usage": True}))
    assert (answer["choices"][0]["message"]["reasoning"], answer["choices"][0]["message"]["content"]) == (
        "there Hi",
        "Hi",
    )
    for usage in (answer["usage"], last["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
