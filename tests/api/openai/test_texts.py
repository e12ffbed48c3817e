"""``/v1/completions`` and ``/v1/chat/completions``: the model's input and the answers, whole and as streams.

``/v1/embeddings``: texts in batches or, with vLLM, one by one; vectors as numbers or as base64.
"""

import base64
import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from app.core.errors import ModelError, UpstreamError
from app.core.inference import InferenceResponse
from app.llm.tokenizer import TokenCounter
from tests.api.openai.conftest import EMBEDDER, EMBEDS, OF_EMBEDDINGS, ask, chunks, refusal, sampling, step
from tests.api.openai.conftest import HELLO as WORDS
from tests.pipelines.test_presets import LLM_API, VLLM
from tests.pipelines.test_presets import answer as llm_api_answer
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.models import refusal as refused_by_model
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


llama = gateway_fixture(CONFIG, VLLM, answers=HELLO)


async def complete(api: Served, **body: Any) -> httpx.Response:
    return await api.client.post("/v1/completions", json={"model": "llama", "prompt": "Hi"} | body)


async def write(api: Served, **body: Any) -> httpx.Response:
    return await complete(api, **{"model": "write", **body})


async def chat(api: Served, **body: Any) -> httpx.Response:
    return await ask(api, **{"model": "write", **body})


def sent(api: Served) -> tuple[str, dict[str, Any]]:
    """Returns the text and the parameters that the model received."""
    request = api.engine.requests[0]
    return request.inputs[0].array[0].decode(), dict(request.parameters)


USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


class TestWhole:
    async def test_a_completion_and_its_chunks(self, api: Served) -> None:
        answer = (await write(api, prompt=["Hi"], max_tokens=9, temperature=0.5, top_p=0.9, seed=7)).json()
        assert answer.pop("id").startswith("cmpl-")
        assert answer.pop("created") > 1_700_000_000
        assert answer == {
            "object": "text_completion",
            "model": "write",
            "choices": [{"index": 0, "text": "Hello you", "logprobs": None, "finish_reason": "length"}],
            "usage": USAGE,
        }
        assert sent(api) == ("Hi", {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 7})
        *events, done = chunks(await write(api, stream=True))
        assert done == "[DONE]"
        assert {event["object"] for event in events} == {"text_completion"}
        assert len({event["id"] for event in events}) == 1
        assert [event["choices"][0]["text"] for event in events] == ["Hel", "lo", " you", ""]
        assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]
        assert not any("usage" in event for event in events)

    async def test_a_chat_whose_answer_is_accepted_as_a_message(self, api: Served) -> None:
        parts = [{"type": "text", "text": each, "prompt_cache_breakpoint": {"mode": "explicit"}} for each in "ab"]
        messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts, "name": "A"}]
        answer = (await chat(api, messages=messages, max_tokens=60, max_completion_tokens=9)).json()
        assert (answer["id"][:9], answer["object"]) == ("chatcmpl-", "chat.completion")
        message = {"role": "assistant", "content": "Hello you", "refusal": None}
        assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        assert sent(api) == ("system: Be kind.\nuser: ab\n", {"max_tokens": 9}), "max_completion_tokens comes first"
        again = [*messages, message | {"tool_calls": None}, {"role": "user", "content": "And?"}]
        assert (await chat(api, messages=again)).status_code == 200

    async def test_own_field_names_and_no_declared_usage(self, api: Served) -> None:
        api.engine.answers = [response(tensor("ANSWER", "BYTES", [b"yes"]))]
        answer = (await write(api, model="echo", max_tokens=3)).json()
        assert answer["choices"][0]["text"] == "yes"
        assert "usage" not in answer
        assert sent(api) == ("Hi", {"limit": 3})
        *events, _done = chunks(await write(api, model="echo", stream=True, stream_options={"include_usage": True}))
        assert [event["usage"] for event in events] == [None] * len(events)

    async def test_null_means_absent(self, api: Served) -> None:
        nulls = dict.fromkeys(("stop", "seed", "stream", "stream_options", "user", "logprobs"))
        assert (await write(api, **nulls, presence_penalty=0.0)).status_code == 200

    async def test_an_early_exit_is_an_empty_text(self, api: Served) -> None:
        api.engine.answers = [refused_by_model("EXIT")]
        answer = await write(api)
        assert answer.headers["x-early-exit"] == "nothing"
        assert answer.json()["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
        api.engine.answers = [refused_by_model("EXIT", None)]
        streamed = await chat(api, stream=True)
        last, done = chunks(streamed)
        assert "x-early-exit" not in streamed.headers
        assert last["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


class TestStop:
    async def test_the_text_ends_before_stop_and_the_model_is_cancelled(self, api: Served) -> None:
        answer = (await write(api, stop="lo")).json()
        assert answer["choices"][0]["text"] == "Hel"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 2
        await api.gateway.inference.cancellations.close()
        assert [request.model for request in api.engine.requests] == ["writer", "writer"]
        assert api.engine.requests[1].inputs[0].name == "CANCEL"
        events = chunks(await write(api, stop=["o y"], stream=True))
        texts = [choice["text"] for event in events[:-1] for choice in event["choices"]]
        assert (texts, events[-1]) == (["Hel", "l", ""], "[DONE]")
        assert events[-2]["choices"][0]["finish_reason"] == "stop"

    async def test_the_text_may_end_with_the_stop_text(self, llama: Served) -> None:
        answer = (await ask(llama, stop=["l"], include_stop_str_in_output=True)).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("Hel", "stop")
        assert sampling(llama)["include_stop_str_in_output"] is True


class TestStream:
    async def test_chunks_of_a_chat_and_the_usage_in_the_last_one(self, api: Served) -> None:
        *events, last, done = chunks(await chat(api, stream=True, stream_options={"include_usage": True}))
        assert done == "[DONE]"
        assert {event["object"] for event in (*events, last)} == {"chat.completion.chunk"}
        assert [event["choices"][0]["delta"] for event in events] == [
            {"role": "assistant", "content": "Hel"},
            {"content": "lo"},
            {"content": " you"},
            {},
        ]
        assert all(event["usage"] is None for event in events)
        assert (last["choices"], last["usage"]) == ([], USAGE)

    async def test_an_error_has_a_status_or_is_the_last_event_after_a_text(self, api: Served) -> None:
        api.engine.answers = [ModelError("It failed.")]
        answer = await chat(api, stream=True)
        assert refusal(answer) == (502, "model_error", None)
        assert answer.headers["x-should-retry"] == "false"
        api.engine.answers = [WORDS[0], ModelError("It failed.")]
        first, last = chunks(await chat(api, stream=True))
        assert first["choices"][0]["delta"]["content"] == "Hel"
        problem = {"message": "It failed.", "type": "server_error", "param": None, "code": "model_error"}
        assert last == {"error": problem}


class TestSeveralChoices:
    async def test_each_choice_is_a_request_with_a_seed_of_its_own(self, llama: Served) -> None:
        answer = (await complete(llama, n=3, seed=10)).json()
        assert [(each["index"], each["text"]) for each in answer["choices"]] == [(each, "Hello") for each in range(3)]
        assert sorted(sampling(llama, index)["seed"] for index in range(3)) == [10, 11, 12]
        assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
        llama.engine.requests.clear()
        assert (await complete(llama, n=2)).status_code == 200
        assert ["seed" in sampling(llama, index) for index in range(2)] == [False, False], "the backend chooses"

    async def test_the_chunks_name_their_choice(self, llama: Served) -> None:
        *events, last, _done = chunks(await ask(llama, n=2, stream=True, stream_options={"include_usage": True}))
        for index in range(2):
            own = [each for event in events for each in event["choices"] if each["index"] == index]
            assert "".join(each["delta"].get("content", "") for each in own) == "Hello"
            assert [each["delta"].get("role") for each in own] == ["assistant"] + [None] * (len(own) - 1)
            assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]
        assert last["usage"]["completion_tokens"] == 6

    async def test_one_failing_choice_fails_the_request(self, llama: Served) -> None:
        llama.engine.answers = [step(b"He"), ModelError("Model 'model' failed.")]
        assert (await complete(llama, n=2)).status_code == 502
        assert llama.engine.closed == 2


async def test_echo_puts_the_prompt_before_the_text(llama: Served) -> None:
    """The prompt is not searched for stop texts."""
    assert (await complete(llama, echo=True)).json()["choices"][0]["text"] == "HiHello"
    first, *_ = chunks(await complete(llama, echo=True, stream=True))
    assert first["choices"][0]["text"] == "HiHel"
    assert (await complete(llama, echo=True, prompt="lo", stop="lo")).json()["choices"][0]["text"] == "loHel"


TOKEN = {
    "11": {"logprob": -0.5, "rank": 2, "decoded_token": "Hel"},
    "12": {"logprob": -0.25, "rank": 1, "decoded_token": "Hol"},
}


class TestLogprobs:
    async def test_chat_has_the_tokens_with_their_alternatives(self, llama: Served) -> None:
        llama.engine.answers = [step(b"Hel", logprobs=[TOKEN], reason=b"stop", is_final=True)]
        choice = (await ask(llama, logprobs=True, top_logprobs=1)).json()["choices"][0]
        hol = {"token": "Hol", "logprob": -0.25, "bytes": [72, 111, 108]}
        hel = {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": [hol]}
        assert choice["logprobs"] == {"content": [hel], "refusal": None}
        assert sampling(llama)["logprobs"] == 1
        assert (await ask(llama)).json()["choices"][0]["logprobs"] is None
        assert "logprobs" not in sampling(llama)

    async def test_completions_have_lists(self, llama: Served) -> None:
        llama.engine.answers = [
            step(b"Hel", logprobs=[TOKEN]),
            step(b"lo", logprobs=[{"3": {"logprob": None, "decoded_token": "lo"}}], reason=b"stop", is_final=True),
        ]
        choice = (await complete(llama, logprobs=2)).json()["choices"][0]
        assert choice["logprobs"] == {
            "tokens": ["Hel", "lo"],
            "token_logprobs": [-0.5, -9999.0],
            "top_logprobs": [{"Hel": -0.5, "Hol": -0.25}, {"lo": -9999.0}],
            "text_offset": [0, 3],
        }

    async def test_each_chunk_has_its_own_tokens(self, llama: Served) -> None:
        llama.engine.answers = [step(b"Hel", logprobs=[TOKEN]), step(b"", logprobs=[], reason=b"stop", is_final=True)]
        first, last, _done = chunks(await ask(llama, logprobs=True, stream=True))
        assert [each["token"] for each in first["choices"][0]["logprobs"]["content"]] == ["Hel"]
        assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_they_are_null_if_the_model_has_none(self, llama: Served, *, stream: bool) -> None:
        for answer in (
            await complete(llama, logprobs=0, stream=stream),
            await ask(llama, logprobs=True, stream=stream),
        ):
            assert answer.status_code == 200, answer.text
            events = chunks(answer)[:-1] if stream else [answer.json()]
            assert [event["choices"][0]["logprobs"] for event in events] == [None] * len(events)

    async def test_tokens_in_another_form_are_a_violation(self, llama: Served) -> None:
        llama.engine.answers = [step(b"Hel", logprobs=[["Hel", -0.5]], reason=b"stop", is_final=True)]
        assert (await ask(llama, logprobs=True)).status_code == 502


async def test_an_adapter_is_a_model(llama: Served) -> None:
    answer = (await ask(llama, model="llama:french")).json()
    assert (answer["model"], sampling(llama)["lora_name"]) == ("llama:french", "fr-v2")


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
    text: str, body: Any, code: str, param: str | None
) -> None:
    error = ModelError("Model 'model' failed.")
    error.upstream = UpstreamError(None, f"Error generating stream: {text}")
    config = f"{CONFIG.rstrip().removesuffix('}')}, tools: hermes}}\n"
    async with served(FakeEngine.of(VLLM, answers=[error]), config) as api:
        assert refusal(await ask(api, **body)) == (400, code, param)


TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "Hi": 1, "there": 2}, "unk_token": "[UNK]"},
    "pre_tokenizer": {"type": "Whitespace"},
}


def tokenizer_in(folder: str, template: str) -> dict[str, bytes]:
    files = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": {"chat_template": template}}
    return {f"{folder}/{name}": json.dumps(content).encode() for name, content in files.items()}


counting = gateway_fixture(
    None,
    LLM_API,
    answers=[llm_api_answer("Hi", is_final=False), llm_api_answer("Hi there you", is_final=True)],
    files=tokenizer_in("tokenizers/model", "{{ messages[0].content }}"),
    tokenizers="tokenizers",
)
"""A backend that counts no tokens, with a folder of tokenizers and no gateway.yaml."""


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
    counting.engine.answers = [llm_api_answer(large, is_final=True)]
    messages = [{"role": "user", "content": large + "you"}]
    answer = (await ask(counting, model="model", messages=messages)).json()
    assert answer["usage"] == {"prompt_tokens": 3001, "completion_tokens": 3000, "total_tokens": 6001}
    assert threads.keys() == {len(large), len(large) + 3}
    assert threading.main_thread().name not in threads.values()


async def test_the_tokenizer_counts_the_reasoning() -> None:
    files = tokenizer_in("qwen", "{{ messages[0].content }}<think>")
    openai = "{chat: {tokenizer: qwen}, reasoning: qwen3}"
    config = f"pipelines: {{llama: {{model: model, preset: vllm, warmup: false, openai: {openai}}}}}"
    answers = [step(b"there Hi"), step(b"</think>"), step(b" Hi", reason=b"stop", is_final=True)]
    async with served(FakeEngine.of(VLLM, answers=answers), config, files=files) as api:
        answer = (await ask(api)).json()
        *_, last, _done = chunks(await ask(api, stream=True, stream_options={"include_usage": True}))
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("there Hi", "Hi")
    for usage in (answer["usage"], last["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


def vectors(*rows: Sequence[float]) -> Any:
    return response(tensor("VECTOR", "FP32", rows), tensor("TOKENS", "INT32", [[3]] * len(rows)))


async def embed(api: Served, **body: Any) -> httpx.Response:
    return await api.client.post("/v1/embeddings", json={"model": "embed", "input": "a"} | body)


async def test_an_embedding_of_one_text(api: Served) -> None:
    api.engine.answers = [vectors([0.5, 1])]
    assert (await embed(api)).json() == {
        "object": "list",
        "model": "embed",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}],
    }
    assert api.engine.requests[0].inputs[0].array.tolist() == [[b"a"]]


async def test_texts_are_sent_in_batches_and_answered_in_order(api: Served) -> None:
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


async def test_base64_encodes_32_bit_floats(api: Served) -> None:
    api.engine.answers = [vectors([0.1, -2])]
    text = (await embed(api, encoding_format="base64", dimensions=2, **OF_EMBEDDINGS)).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [np.float32(0.1), -2]


async def test_a_failed_batch_fails_the_request(api: Served) -> None:
    api.engine.answers = [ModelError("It failed.")]
    assert refusal(await embed(api, input=["a", "b"])) == (502, "model_error", None)


async def test_an_early_exit_is_an_empty_vector(api: Served) -> None:
    api.engine.answers = [refused_by_model("EXIT")]
    answer = await embed(api)
    assert answer.headers["x-early-exit"] == "nothing"
    assert answer.json()["data"] == [{"object": "embedding", "index": 0, "embedding": []}]


@pytest.mark.parametrize("rows", [[[0, 0]], [[0, 0]] * 3, [[0, 0, 0]] * 2], ids=["too few", "too many", "too long"])
async def test_a_wrong_shape_violates_the_contract(api: Served, rows: list[list[float]]) -> None:
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
    api: Served, texts: list[str], vector: Any, tokens: Any
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


EMBEDDING = "pipelines: {embed: {model: model, preset: vllm_embeddings, warmup: false}}"


def vector(text: bytes) -> InferenceResponse:
    return response(tensor("text_output", "BYTES", [text]), tensor("num_input_tokens", "UINT32", 3), is_final=True)


vllm = gateway_fixture(EMBEDDING, EMBEDS, answers=[vector(b"[0.5, 1]")])


def sent_to_vllm(vllm: Served) -> list[Any]:
    requests = [{each.name: each.array for each in request.inputs} for request in vllm.engine.requests]
    assert all(each["text_input"].item() == b"" for each in requests)
    return [json.loads(each["embedding_request"].item()) for each in requests]


async def test_a_text_is_a_request_to_vllm(vllm: Served) -> None:
    answer = (await embed(vllm)).json()
    assert (answer["data"][0]["embedding"], answer["usage"]["prompt_tokens"]) == ([0.5, 1.0], 3)
    assert sent_to_vllm(vllm) == [{"input": "a"}]


@pytest.mark.parametrize(
    ("given", "items"),
    [(["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), (["a", [4]], ["a", [4]])],
)
async def test_each_text_or_list_of_token_ids_is_a_request(vllm: Served, given: Any, items: list[Any]) -> None:
    answer = (await embed(vllm, input=given, dimensions=2)).json()
    assert len(answer["data"]) == len(items)
    assert answer["usage"]["total_tokens"] == 3 * len(items)
    expected = [{"input": each, "pooling_params": {"dimensions": [2]}} for each in items]
    assert sorted(map(str, sent_to_vllm(vllm))) == sorted(map(str, expected))


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
