"""The key ``openai:`` is checked against the fields and the model of its pipeline."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.core.model import ModelConfig
from app.pipelines.llm_spec import OpenAISpec
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.pipeline import Pipeline
from tests.toolkit.models import model, pipeline

WRITER = model(
    ["PROMPT BYTES [1]", "MANY BYTES [-1] optional"],
    ["TEXT BYTES [1]", "IDS INT32 [-1]", "WHY BYTES [1]", "COUNT INT32 [1]", "WORDS BYTES [-1]"],
    decoupled=True,
)
INPUTS = {"prompt": {"tensor": "PROMPT", "kind": "text"}, "many": {"tensor": "MANY", "kind": "text", "optional": True}}
OUTPUTS = {
    "text": {"tensor": "TEXT", "kind": "text"},
    "ids": {"tensor": "IDS"},
    "finish_reason": {"tensor": "WHY", "kind": "text", "join": "last"},
    "words": {"tensor": "WORDS", "kind": "text"},
}
PARAMETERS = {"max_new_tokens": {"type": "integer", "optional": True}, "seed": {"type": "integer", "optional": True}}
CHAT = {"template_text": "{{ messages[0].content }}"}
VECTORS = model("TEXT BYTES [1]", ["VECTOR FP32 [4]", "PAIRS FP32 [2,2]", "TOKENS INT32 [1]"], max_batch_size=8)


def writer(**openai: Any) -> Pipeline:
    return pipeline(WRITER, inputs=INPUTS, outputs=OUTPUTS, parameters=PARAMETERS, openai=openai)


def embedder(config: ModelConfig = VECTORS, embedding: str = "VECTOR", **openai: Any) -> Pipeline:
    inputs, outputs = {"text": {"tensor": "TEXT", "kind": "text"}}, {"embedding": {"tensor": embedding}}
    return pipeline(config, inputs=inputs, outputs=outputs, openai={"embeddings": {}, **openai})


def test_field_names_have_defaults() -> None:
    form = writer(completions={}, chat=CHAT).openai
    assert form.embeddings is None
    assert (form.completions.prompt, form.completions.text) == ("prompt", "text")
    assert form.completions.finish_reason == "finish_reason"
    assert form.completions.usage is None
    assert form.chat.template is not None


def test_openai_parameters_map_to_fields_of_the_pipeline() -> None:
    form = writer(completions={}, chat=CHAT, parameters={"max_tokens": "max_new_tokens"}).openai
    assert form.completions.field_by_parameter == {"many": "many", "seed": "seed", "max_tokens": "max_new_tokens"}
    assert form.chat.field_by_parameter["max_completion_tokens"] == "max_new_tokens"


def test_a_pipeline_with_embeddings() -> None:
    form = embedder(usage={"prompt_tokens": "TOKENS"}).openai
    assert (form.embeddings.length, form.embeddings.counts_tokens) == (4, True)


@pytest.mark.parametrize(
    ("openai", "location", "text"),
    [
        (
            {"completions": {"prompt": "promt"}},
            "completions.prompt",
            "'promt' is not an input of the pipeline; did you",
        ),
        ({"completions": {"prompt": "seed"}}, "completions.prompt", "'seed' is not an input of the pipeline"),
        ({"completions": {"prompt": "many"}}, "completions.prompt", "'many' must be a single text"),
        (
            {"completions": {"text": "txt"}},
            "completions.text",
            "'txt' is not an output of the pipeline; did you mean",
        ),
        ({"completions": {"text": "ids"}}, "completions.text", "'ids' must be a single text"),
        ({"chat": {"template_text": "{% if %}"}}, "chat.template_text", "is not a template: line 1: "),
        ({"chat": {**CHAT, "text": "words"}}, "chat.text", "'words' must be a single text"),
        ({"completions": {}, "finish_reason": "why"}, "finish_reason", "'why' is not an output of the pipeline"),
        (
            {"completions": {}, "parameters": {"max_tokens": "max_new"}},
            "parameters.max_tokens",
            "'max_new' is not an input or parameter of the pipeline; did you mean 'max_new_tokens'?",
        ),
        (
            {"completions": {}, "usage": {"prompt_tokens": "COUNTS"}},
            "usage.prompt_tokens",
            "'COUNTS' is not a tensor of the model; did you mean 'COUNT'?",
        ),
        (
            {"completions": {}, "usage": {"prompt_tokens": "COUNT", "completion_tokens": "TEXT"}},
            "usage.completion_tokens",
            "'TEXT' has datatype BYTES; an integer type is needed",
        ),
        (
            {"embeddings": {"input": "prompt", "embedding": "ids"}},
            "embeddings.embedding",
            "'ids' is not a list of floating-point numbers",
        ),
    ],
)
def test_mismatches_are_reported_with_their_key(openai: dict[str, Any], location: str, text: str) -> None:
    with pytest.raises(PipelineMismatch) as caught:
        writer(**openai)
    assert ".".join(map(str, caught.value.location)) == f"openai.{location}"
    assert caught.value.text.startswith(text)


def test_only_vectors_of_one_response_are_embeddings() -> None:
    config = model("TEXT BYTES [1]", "VECTOR FP32 [4]", max_batch_size=4, decoupled=True)
    with pytest.raises(PipelineMismatch, match="requires a model that is not decoupled, or has no batches"):
        embedder(config)
    with pytest.raises(PipelineMismatch, match="'embedding' is not a list of floating-point numbers"):
        embedder(embedding="PAIRS")


@pytest.mark.parametrize(
    ("openai", "text"),
    [
        ({}, "needs one of completions, chat and embeddings"),
        ({"chat": {}}, "needs exactly one of template, template_text and tokenizer"),
        ({"chat": {"template": "a", "template_text": "b"}}, "needs exactly one of template, template_text and"),
        ({"chat": {"template": "a", "tokenizer": "b"}}, "needs exactly one of template, template_text and tokenizer"),
        ({"chat": {"tokenizer": "b", "bos": "add"}}, "Input should be 'strip' or 'keep'"),
        ({"chat": CHAT, "tools": "gpt_oss"}, "tools: gpt_oss needs reasoning: gpt_oss"),
        ({"chat": CHAT, "tools": "hermes", "reasoning": "gpt_oss"}, "reasoning: gpt_oss needs tools: gpt_oss"),
        ({"chat": CHAT, "reasoning": ["<think>"]}, "List should have at least 2 items"),
        ({"chat": CHAT, "reasoning": ["<think>", ""]}, "String should have at least 1 character"),
        ({"completions": {}, "parameters": {"max_token": "x"}}, "Input should be 'max_tokens', 'temperature'"),
    ],
)
def test_invalid_keys_and_combinations_are_rejected(openai: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        OpenAISpec.model_validate(openai)
