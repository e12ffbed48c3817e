"""``/v1/completions`` and ``/v1/chat/completions``: the model's input, the answers, and rejected requests."""

from typing import Any

import pytest

from app.core.errors import ModelError
from tests.api.openai.conftest import HELLO, Api, chunks, refusal
from tests.toolkit.models import refusal as refused_by_model
from tests.toolkit.models import response, tensor


def sent(api: Api) -> tuple[str, dict[str, Any]]:
    """Returns the text and the parameters that the model received."""
    request = api.engine.requests[0]
    return request.inputs[0].array[0].decode(), dict(request.parameters)


class TestWhole:
    async def test_a_completion(self, complete: Any, api: Api) -> None:
        answer = (await complete(max_tokens=9, temperature=0.5, top_p=0.9, seed=7)).json()
        assert answer.pop("id").startswith("cmpl-")
        assert answer.pop("created") > 1_700_000_000
        assert answer == {
            "object": "text_completion",
            "model": "write",
            "choices": [{"index": 0, "text": "Hello you", "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
        }
        assert sent(api) == ("Hi", {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 7})

    async def test_a_chat_completion(self, chat: Any, api: Api) -> None:
        messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi", "name": "A"}]
        answer = (await chat(messages=messages, max_completion_tokens=9)).json()
        assert (answer["id"][:9], answer["object"]) == ("chatcmpl-", "chat.completion")
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello you", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ]
        assert sent(api) == ("system: Be kind.\nuser: Hi\n", {"max_tokens": 9})

    async def test_text_parts_are_joined(self, chat: Any, api: Api) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert (await chat(messages=[{"role": "user", "content": parts}])).status_code == 200
        assert sent(api)[0] == "user: ab\n"

    async def test_an_answer_is_accepted_as_a_message(self, chat: Any) -> None:
        message = (await chat()).json()["choices"][0]["message"]
        again = [{"role": "user", "content": "Hi"}, message | {"tool_calls": None}, {"role": "user", "content": "And?"}]
        assert (await chat(messages=again)).status_code == 200

    async def test_a_list_with_one_prompt_is_accepted(self, complete: Any, api: Api) -> None:
        assert (await complete(prompt=["Hi"])).status_code == 200
        assert sent(api)[0] == "Hi"

    async def test_own_field_names_and_no_declared_usage(self, complete: Any, api: Api) -> None:
        api.engine.answers = [response(tensor("ANSWER", "BYTES", [b"yes"]))]
        answer = (await complete(model="echo", max_tokens=3)).json()
        assert answer["choices"][0]["text"] == "yes"
        assert "usage" not in answer
        assert sent(api) == ("Hi", {"limit": 3})

    async def test_an_early_exit_is_an_empty_text(self, complete: Any, api: Api) -> None:
        api.engine.answers = [refused_by_model("EXIT")]
        answer = await complete()
        assert answer.headers["x-early-exit"] == "nothing"
        assert answer.json()["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


class TestStop:
    async def test_the_text_ends_before_stop_and_the_model_is_cancelled(self, complete: Any, api: Api) -> None:
        answer = (await complete(stop="lo")).json()
        assert answer["choices"][0]["text"] == "Hel"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 2
        await api.gateway.inference.canceller.close()
        assert [request.model for request in api.engine.requests] == ["writer", "writer"]
        assert api.engine.requests[1].inputs[0].name == "CANCEL"

    async def test_a_stream_ends_at_the_stop_text(self, complete: Any, api: Api) -> None:
        events = chunks(await complete(stop=["o y"], stream=True))
        texts = [choice["text"] for event in events[:-1] for choice in event["choices"]]
        assert (texts, events[-1]) == (["Hel", "l", ""], "[DONE]")
        assert events[-2]["choices"][0]["finish_reason"] == "stop"


class TestStream:
    async def test_chunks_of_a_completion(self, complete: Any) -> None:
        *events, done = chunks(await complete(stream=True))
        assert done == "[DONE]"
        assert {event["object"] for event in events} == {"text_completion"}
        assert len({event["id"] for event in events}) == 1
        assert [event["choices"][0]["text"] for event in events] == ["Hel", "lo", " you", ""]
        assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]
        assert not any("usage" in event for event in events)

    async def test_chunks_of_a_chat(self, chat: Any) -> None:
        *events, done = chunks(await chat(stream=True))
        assert done == "[DONE]"
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert [event["choices"][0]["delta"] for event in events] == [
            {"role": "assistant", "content": "Hel"},
            {"content": "lo"},
            {"content": " you"},
            {},
        ]

    async def test_include_usage_adds_a_last_chunk(self, chat: Any) -> None:
        *events, last, _done = chunks(await chat(stream=True, stream_options={"include_usage": True}))
        assert all(event["usage"] is None for event in events)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}

    async def test_an_error_before_the_first_text_has_its_status(self, chat: Any, api: Api) -> None:
        api.engine.answers = [ModelError("It failed.")]
        answer = await chat(stream=True)
        assert refusal(answer) == (502, "model_error", None)
        assert answer.headers["x-should-retry"] == "false"

    async def test_an_error_after_the_first_text_is_the_last_event(self, chat: Any, api: Api) -> None:
        api.engine.answers = [HELLO[0], ModelError("It failed.")]
        first, last = chunks(await chat(stream=True))
        assert first["choices"][0]["delta"]["content"] == "Hel"
        assert last == {
            "error": {"message": "It failed.", "type": "server_error", "param": None, "code": "model_error"}
        }

    async def test_an_empty_answer_has_a_role(self, chat: Any, api: Api) -> None:
        api.engine.answers = [refused_by_model("EXIT", None)]
        last, done = chunks(await chat(stream=True))
        assert last["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"n": True}, "n"),
            ({"best_of": 2}, "best_of"),
            ({"logprobs": 1}, "logprobs"),
            ({"suffix": "x"}, "suffix"),
            ({"presence_penalty": 0.5}, "presence_penalty"),
            ({"max_tokens": 65}, "max_tokens"),
            ({"max_tokens": "9"}, "max_tokens"),
            ({"max_completion_tokens": 9}, "max_completion_tokens"),
            ({"stop": ["a"] * 5}, "stop"),
            ({"stop": [""]}, "stop"),
            ({"stop": "x" * 257}, "stop"),
            ({"stream": "yes"}, "stream"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream": True, "stream_options": {"foo": 1}}, "stream_options"),
            ({"prompt": None}, "prompt"),
            ({"prompt": [1, 2]}, "prompt"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"model": None}, "model"),
            ({"model": 5}, "model"),
            ({"messages": []}, "messages"),
        ],
        ids=str,
    )
    async def test_an_unsupported_field_is_400(self, complete: Any, body: dict[str, Any], param: str) -> None:
        status, code, found = refusal(await complete(**body))
        assert (status, code) == (400, "invalid_input")
        assert str(found).startswith(param)

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"response_format": {"type": "xml"}}, "response_format"),
            ({"logprobs": True}, "logprobs"),
            ({"max_completion_tokens": 65}, "max_completion_tokens"),
            ({"messages": None}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
            ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages"),
            ({"prompt": "x"}, "prompt"),
        ],
        ids=str,
    )
    async def test_an_unsupported_chat_field_is_400(self, chat: Any, body: dict[str, Any], param: str) -> None:
        status, code, found = refusal(await chat(**body))
        assert (status, code) == (400, "invalid_input")
        assert str(found).startswith(param)

    async def test_null_means_absent(self, complete: Any) -> None:
        nulls = dict.fromkeys(("stop", "seed", "stream", "stream_options", "user", "logprobs"))
        assert (await complete(**nulls, presence_penalty=0.0)).status_code == 200

    @pytest.mark.parametrize(
        ("message", "expected"),
        [
            ({"role": "user"}, "'messages[0]' must have the field 'content'."),
            ({"role": "user", "content": "x", "secret": 1}, "'messages[0]' has a field that is not supported."),
            ({"role": "secret", "content": "x"}, "'messages[0].role' is not one of the allowed values."),
            ({"role": "user", "content": 5}, "'messages[0].content' must be a string or a list, not an integer."),
        ],
    )
    async def test_the_error_names_the_position_in_messages(
        self, chat: Any, message: dict[str, Any], expected: str
    ) -> None:
        assert (await chat(messages=[message])).json()["error"]["message"] == expected

    async def test_errors_use_the_callers_names(self, complete: Any) -> None:
        answer = await complete(model="echo", max_tokens=10)
        assert answer.json()["error"]["message"] == "'max_tokens' must be an integer <= 9."

    async def test_unknown_usage_is_absent(self, complete: Any, api: Api) -> None:
        api.engine.answers = [response(tensor("ANSWER", "BYTES", [b"x"]))]
        answer = await complete(model="echo", stream=True, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in chunks(answer)[:-1]] == [None] * (len(chunks(answer)) - 1)

    @pytest.mark.parametrize("model", ["nobody", "embed", "other"])
    async def test_a_model_without_completions_is_404(self, complete: Any, model: str) -> None:
        assert refusal(await complete(model=model)) == (404, "model_not_found", None)

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            (b"{", "invalid_json"),
            (b'{"model": "write", "prompt": "a" "b"}', "invalid_json"),
            (b'{"model": "write", "prompt": nul}', "invalid_json"),
            (b'{"model": "write", "prompt": "a", "prompt": "b"}', "invalid_input"),
            (b"[]", "invalid_request"),
            (b'{"model": "write", "prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "invalid_json"),
        ],
    )
    async def test_a_malformed_body_is_400(self, api: Api, body: bytes, code: str) -> None:
        answer = await api.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert refusal(answer)[:2] == (400, code)

    async def test_routing_errors_have_openais_format(self, api: Api) -> None:
        assert refusal(await api.client.get("/v1/completions"))[:2] == (405, "method_not_allowed")
        assert refusal(await api.client.post("/v1/chat/foo"))[:2] == (404, "not_found")
        assert refusal(await api.client.post("/v1/completions", content=b"x"))[:2] == (415, "unsupported_media_type")

    async def test_error_messages_do_not_repeat_the_input(self, complete: Any) -> None:
        for body in ({"n": "secret"}, {"stop": [["secret"]]}, {"seed": "secret"}, {"prompt": {"secret": 1}}):
            assert "secret" not in (await complete(**body)).text
