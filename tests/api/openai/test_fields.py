"""What each field of OpenAI's reference becomes with each preset, as docs/reference/openai-fields.md says it.

Every field is sent through a gateway to a stand-in of each backend. The tables must have what arrives there.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams

from app.api.openai.requests import NEUTRAL_OF_EMBEDDINGS, NEUTRAL_OF_TEXTS
from app.core.inference import InferenceRequest
from app.pipelines.llm_spec import NAMES, preset_of
from tests.api.openai.conftest import ADDRESSES, ASKED, BODIES, ECHO, OF_EMBEDDINGS, engine_step, refusal, step
from tests.api.openai.test_texts import TOKEN
from tests.docs.pages import Row, rows_under
from tests.pipelines.test_presets import CONFIGS, answer
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.models import response, tensor

OF_TEXTS: dict[str, Any] = OF_EMBEDDINGS | {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "auto",
    "functions": [],
    "ignore_eos": False,
    "logit_bias": {},
    "logprobs": False,
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "def"},
    "presence_penalty": 0,
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "suffix": "",
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "verbosity": "low",
}
"""Values without an effect."""
PAGE = "docs/reference/openai-fields.md"
CONFIG = """
pipelines:
  llm: &llm
    model: model
    preset: PRESET
    warmup: false
    openai: {chat: {template_text: "{{ messages[0].content }}"}}
  other: *llm
"""


ANSWERS = {
    "vllm": [step(b"Hel", logprobs=[TOKEN]), step(b"lo", logprobs=[TOKEN], reason=b"stop", is_final=True)],
    "tensorrt_llm": [engine_step(b"Hel", is_final=False), engine_step(b"lo", is_final=True)],
    "tensorrt_llm_api": [answer("Hel", is_final=False), answer("Hello", is_final=True)],
}
PRESETS = [name for name in NAMES if "completions" in preset_of(name).pipeline["openai"]]
FIELDS = {
    "chat": ChatParams.__required_keys__ | ChatParams.__optional_keys__,
    "completions": CompletionParams.__required_keys__ | CompletionParams.__optional_keys__,
}
"""The fields of OpenAI's reference."""
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNiAAAABgADNjd8qAAAAABJRU5ErkJggg=="
VALUES: dict[str, Any] = OF_TEXTS | {
    "allowed_token_ids": [5],
    "audio": {"format": "mp3", "voice": "alloy"},
    "bad_words": ["x"],
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_decoding_guide": "a+",
    "guided_decoding_guide_type": "regex",
    "ignore_eos": True,
    "images": [PNG],
    "include_stop_str_in_output": True,
    "length_penalty": 0.5,
    "logit_bias": {"5": 1},
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Bye"}],
    "min_p": 0.5,
    "min_tokens": 2,
    "modalities": ["text", "audio"],
    "model": "other",
    "moderation": {"model": "x"},
    "n": 2,
    "presence_penalty": 0.5,
    "prompt": "Bye",
    "reasoning_effort": "high",
    "repetition_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "seed": 3,
    "skip_special_tokens": False,
    "stop": "l",
    "stop_token_ids": [5],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["x"]},
    "suffix": "x",
    "temperature": 0.5,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_k": 4,
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncate_prompt_tokens": 5,
    "web_search_options": {},
}
"""For each field a value that asks for something, if there is one."""
LOGPROBS = {"chat": True, "completions": 2}
OBJECT = {"type": "object"}
GUIDED = {
    "member `structured_outputs`": {"json": OBJECT},
    "tensor `guided_decoding_guide`": OBJECT,
    "tensor `guided_decoding_guide_type`": "json_schema",
}
SENT: dict[tuple[str, str], Any] = {
    ("chat", "messages"): "Bye",
    ("chat", "logprobs"): 0,
    ("chat", "response_format"): GUIDED,
}
"""What the backend gets, if it is not the value; GUIDED: by place."""
WITH: dict[str, Any] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "include_stop_str_in_output": {"stop": "l"},
}
"""The fields without which a field has no meaning."""


def own_fields() -> set[str]:
    """The fields of the presets that are not in OpenAI's reference."""
    declared = [preset_of(name).pipeline[key] for name in PRESETS for key in ("inputs", "parameters")]
    settable = {name for each in declared for name, spec in each.items() if "send" not in spec and "hidden" not in spec}
    return settable - FIELDS["chat"] - FIELDS["completions"]


async def outcome(api: Served, address: str, fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str] | None:
    """Returns what the backend got, by place, and the body of the answer without its id and time.

    None if the gateway refuses a field by its name.
    """
    api.engine.requests.clear()
    answered = await api.client.post(ADDRESSES[address], json={"model": "llm"} | BODIES[address] | dict(fields))
    if answered.status_code == 400:
        assert answered.json()["error"]["param"] in fields
        return None
    assert answered.status_code == 200 or answered.json()["error"]["code"] == "response_format_mismatch"
    text = re.sub(r'"(id|created)":("[^"]*"|\d+)', "", answered.text)
    return [values_of(request) for request in api.engine.requests], text


def values_of(request: InferenceRequest) -> dict[str, Any]:
    """The values by place: an input, or a member of ``sampling_parameters``."""
    values: dict[str, Any] = {}
    for each in request.inputs:
        found = [value.decode() if isinstance(value, bytes) else value for value in each.array.reshape(-1).tolist()]
        if each.name == "sampling_parameters":
            values |= {f"member `{name}`": value for name, value in json.loads(found[0]).items()}
        else:
            values[f"tensor `{each.name}`"] = found
    return values


def carries(sent: Any, value: Any) -> bool:
    if isinstance(sent, list):  # images of the LLM API
        sent = [each.removeprefix("data:image/png;base64,") if isinstance(each, str) else each for each in sent]
    text = sent[0] if isinstance(sent, list) else sent
    return sent in (value, [value]) or (isinstance(value, dict) and json.loads(text) == value)


async def cell_of(api: Served, address: str, field: str) -> str:
    """What the field becomes, in the words of the page."""
    value = LOGPROBS[address] if field == "logprobs" else VALUES[field]
    more = WITH.get(field, {})
    before, after = await outcome(api, address, more), await outcome(api, address, {**more, field: value})
    if before is not None and after is not None and before != after:
        ((usual, *_), text), ((changed, *_), changed_text) = before, after
        places = [place for place, sent in changed.items() if usual.get(place) != sent]
        wanted = SENT.get((address, field), value)
        for place in places:
            assert carries(changed[place], wanted[place] if wanted is GUIDED else wanted)
        return ", ".join([*places, *(["the gateway"] if text != changed_text else [])])
    if field not in NEUTRAL_OF_TEXTS:
        assert after is None
        return "400"
    assert await outcome(api, address, {field: OF_TEXTS[field]}) == await outcome(api, address, {})
    return f"no effect: {NEUTRAL_OF_TEXTS[field].meaning}"


@pytest.fixture
async def presets() -> AsyncIterator[list[Served]]:
    """A gateway for each preset."""
    async with AsyncExitStack() as stack:
        engines = {name: FakeEngine.of(CONFIGS[name], answers=ANSWERS[name]) for name in PRESETS}
        made = [served(engine, CONFIG.replace("PRESET", name)) for name, engine in engines.items()]
        yield [await stack.enter_async_context(each) for each in made]


async def rows_of(presets: list[Served], field: str, fields: Mapping[str, Any]) -> list[Row]:
    """The cells of a field for each preset, after the address; one row for both addresses if they are alike."""
    cells = {
        address: tuple([await cell_of(api, address, field) for api in presets])
        for address, names in fields.items()
        if field in names
    }
    if len(cells) == 2 and len(set(cells.values())) == 1:
        return [(f"`{field}`", "both", *cells["chat"])]
    return [(f"`{field}`", address, *row) for address, row in cells.items()]


async def tables_of(presets: list[Served]) -> dict[str, list[Row]]:
    """The rows of the page, by heading."""
    every = sorted(FIELDS["chat"] | FIELDS["completions"])
    rows = [row for field in every for row in await rows_of(presets, field, FIELDS)]
    alike = [row for row in rows if len(set(row[2:])) == 1]
    neutral = [row for row in alike if row[2].startswith("no effect: ")]
    generated = {
        name: f"no effect: {row[1]}"
        for row in rows_under("docs/reference/openai.md", "Fields without an effect")
        for name in row[0].split(", ")
    }
    assert all(generated[row[0]] == row[2] for row in neutral)
    everywhere = dict.fromkeys(FIELDS, own_fields())
    own = [row for field in sorted(own_fields()) for row in await rows_of(presets, field, everywhere)]
    assert {row[1] for row in own} == {"both"}
    return {
        "Alike for every backend": [row[:3] for row in alike if row not in neutral],
        "By backend": [row for row in rows if row not in alike],
        "Fields of the backends": [(row[0], *row[2:]) for row in own],
    }


def test_every_field_has_a_value() -> None:
    assert FIELDS["chat"] | FIELDS["completions"] | own_fields() == VALUES.keys()
    assert (OF_TEXTS.keys(), OF_EMBEDDINGS.keys()) == (NEUTRAL_OF_TEXTS.keys(), NEUTRAL_OF_EMBEDDINGS.keys())
    read = {"model", "input", "dimensions", "encoding_format"}
    assert EmbeddingCreateParams.__annotations__.keys() <= read | NEUTRAL_OF_EMBEDDINGS.keys()


async def test_the_page_says_what_each_field_becomes(presets: list[Served]) -> None:
    for heading, rows in (await tables_of(presets)).items():
        lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        assert rows_under(PAGE, heading) == rows, f"{heading}:\n{lines}"


async def test_the_openapi_document_has_the_accepted_values(api: Served) -> None:
    document = (await api.client.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["title"] == "write"
    request = {"model": "write", "messages": ASKED}
    jsonschema.validate(request | OF_TEXTS, body)
    for wrong in ({"user": 5}, {"metadata": {"a": "x" * 513}}, {"verbosity": "loud"}, {"ignore_eos": True}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(request | wrong, body)


IGNORED = {"frequency_penalty": 0.5, "logit_bias": {"0": 1}, "logprobs": True, "temperature": 0.7, "top_logprobs": 2}
PLAIN = """
pipelines:
  plain:
    model: echo
    inputs: {line: {tensor: LINE, kind: text}}
    outputs: {answer: {tensor: ANSWER, kind: text}}
    parameters: {top_p: {type: number, maximum: 1, optional: true}}
    openai:
      completions: {prompt: line, text: answer}
      chat: {prompt: line, text: answer, template_text: "{{ messages[0].content }}"}
      ignored: [frequency_penalty, logit_bias, logprobs, temperature, top_logprobs, top_p]
"""


plain = gateway_fixture(PLAIN, ECHO, answers=[response(tensor("ANSWER", "BYTES", [b"Hello"]))])


@pytest.mark.parametrize("address", ["completions", "chat"])
async def test_ignored_fields_are_accepted_and_others_are_400(plain: Served, address: str) -> None:
    async def asked(**body: Any) -> httpx.Response:
        return await plain.client.post(ADDRESSES[address], json={"model": "plain"} | BODIES[address] | body)

    for body in (IGNORED, {"stop": []}):
        answer = await asked(**body)
        assert (answer.status_code, "Hello" in answer.text) == (200, True)
    assert refusal(await asked(seed=1))[::2] == (400, "seed")
    # A field of the pipeline keeps its effect.
    assert refusal(await asked(top_p=1.5))[::2] == (400, "top_p")
