"""Describes OpenAI's addresses, typed from the pipelines that declare ``openai:``.

The schemas of answers are the same for all models. Each model has its own request schema, with the fields of its
pipeline.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from app.api.openai import text_routes
from app.api.openai.chat_messages import CallMessage, PlainMessage, TextPart
from app.api.openai.embeddings import MAX_INPUTS, EmbeddingsRoute, OpenAIEmbeddings, Texts
from app.api.openai.members import NEUTRAL_OF_EMBEDDINGS, NEUTRAL_OF_TEXTS, Neutral
from app.api.openai.openai_errors import OpenAIError, openai_status_of
from app.api.openai.openai_models import OpenAIModel, OpenAIModelList, ids_of
from app.api.openai.requests import Door
from app.api.openai.response_format import ResponseFormat
from app.api.openai.text_answers import (
    OpenAIChatCompletion,
    OpenAIChatCompletionChunk,
    OpenAICompletion,
    OpenAICompletionChunk,
)
from app.api.openai.tools import ReasoningEffort, ToolChoice, ToolList
from app.api.openapi import (
    INFERENCE_ERRORS,
    TIMEOUT_HEADER,
    ErrorAnswers,
    Operation,
    Visible,
    answer,
    in_path,
    json_answer,
)
from app.core import errors
from app.core.errors import GatewayError
from app.core.json import TEXT, Schema, const_of, enum_of, one_of, schema_of
from app.pipelines.examples import example_of
from app.pipelines.openai_mapping import EmbeddingsForm, TextForm
from app.pipelines.parameters import TokenIds
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import request_schema

ERRORS = ErrorAnswers("OpenAIError", {"application/json": {"schema": OpenAIError}}, openai_status_of)
Form = TypeVar("Form", TextForm, EmbeddingsForm)
Described = tuple[Schema, Schema]
"""The schema of a body, and an example without its ``model``."""
_DESCRIPTION = "As OpenAI's API, so that its clients work. Fields that would change the answer are refused."
_SUMMARIES = {
    "create_completion": "Continue a text",
    "create_chat_completion": "Answer a message",
    "create_embedding": "Texts as vectors",
}
_OPTIONS_OF_STREAMS: Schema = {
    "stream_options": {
        "anyOf": [
            {"required": ["stream"], "properties": {"stream": const_of(True)}},
            {"properties": {"stream_options": {"type": "null"}}},
        ]
    }
}
_ONE_LIMIT: Schema = {
    "max_completion_tokens": {
        "anyOf": [
            {"properties": {"max_completion_tokens": {"type": "null"}}},
            {"properties": {"max_tokens": {"type": "null"}}},
        ]
    }
}
"""Only one of ``max_tokens`` and ``max_completion_tokens`` may be given."""


def tags_of(_visible: Visible) -> Mapping[str, str]:
    return {"openai": "The addresses of OpenAI's API"}


def completions(visible: Visible) -> Iterator[Operation]:
    def described(pipeline: Pipeline, form: TextForm) -> Described:
        fields = _text_fields(pipeline, form) | {"echo": schema_of(bool | None)}
        schema = _schema(pipeline, form, {"prompt": schema_of(text_routes.OneText)}, fields)
        return schema | {"dependentSchemas": _OPTIONS_OF_STREAMS}, {"prompt": _example_text(pipeline, form.prompt)}

    served = _served(visible, text_routes.CompletionsRoute)
    ok = _text_answer(OpenAICompletion, OpenAICompletionChunk, served)
    yield from _inference("create_completion", ok, served, described)


def chat(visible: Visible) -> Iterator[Operation]:
    def described(pipeline: Pipeline, form: TextForm) -> Described:
        messages = {"type": "array", "items": _message(form), "minItems": 1}
        schema = _schema(pipeline, form, {"messages": messages}, _text_fields(pipeline, form) | _chat_fields(form))
        if form.images is not None:  # they may be in the messages
            names = form.field_by_parameter
            schema["required"] = [name for name in schema["required"] if names.get(name) != form.images.input]
        example = {"messages": [{"role": "user", "content": "Hello"}]}
        return schema | {"dependentSchemas": _ONE_LIMIT | _OPTIONS_OF_STREAMS}, example

    served = _served(visible, text_routes.ChatRoute)
    ok = _text_answer(OpenAIChatCompletion, OpenAIChatCompletionChunk, served)
    further = (errors.ToolCallMissing, errors.FormatMismatch)
    yield from _inference("create_chat_completion", ok, served, described, *further)


def embeddings(visible: Visible) -> Iterator[Operation]:
    def described(pipeline: Pipeline, form: EmbeddingsForm) -> Described:
        forms = [schema_of(str), schema_of(Texts)]
        if form.takes_tokens:
            tokens = schema_of(TokenIds)
            forms += [tokens, {"type": "array", "items": tokens, "minItems": 1, "maxItems": MAX_INPUTS}]
        fields = _neutral(NEUTRAL_OF_EMBEDDINGS) | {"encoding_format": schema_of(Literal["float", "base64"] | None)}
        if form.length > 0:
            fields["dimensions"] = enum_of([form.length, None])
        example = {"input": [_example_text(pipeline, form.input)]}
        return _schema(pipeline, form, {"input": {"anyOf": forms}}, fields), example

    ok = json_answer("A vector for each text", OpenAIEmbeddings)
    yield from _inference("create_embedding", ok, _served(visible, EmbeddingsRoute), described)


def _served(visible: Visible, door: type[Door[Form]]) -> Sequence[tuple[Pipeline, Form]]:
    found = ((each, None if each.openai is None else door.form_of(each.openai)) for each in visible.pipelines)
    return [(pipeline, form) for pipeline, form in found if form is not None]


def _example_text(pipeline: Pipeline, field: str) -> Any:
    return example_of(pipeline).get(field, "text")


def _inference(
    name: str,
    ok: Schema,
    served: Sequence[tuple[Pipeline, Form]],
    described: Callable[[Pipeline, Form], Described],
    *further: type[GatewayError],
) -> Iterator[Operation]:
    """Nothing for an address that no pipeline serves."""
    schemas: list[Schema] = []
    examples: Schema = {}
    for pipeline, form in served:
        schema, example = described(pipeline, form)
        schemas.append(schema)
        value = {"model": pipeline.name, **example}
        examples[pipeline.name] = {"summary": "A valid request", "value": value}
    if served:
        body = {"application/json": {"schema": one_of(schemas), "examples": examples}}
        possible = (errors.UnknownPipeline, *INFERENCE_ERRORS, *further)
        summary, parameters = _SUMMARIES[name], [TIMEOUT_HEADER]
        yield Operation(
            name, "openai", {200: ok}, possible, parameters, body, summary=summary, description=_DESCRIPTION
        )


def _text_answer(whole: type, chunk: type, served: Sequence[tuple[Pipeline, TextForm]]) -> Schema:
    """``x-event-data`` has the types of a stream's events, which OpenAPI 3.1 cannot describe."""
    content: Schema = {"application/json": {"schema": whole}}
    if any(pipeline.spec.stream is not None for pipeline, _ in served):
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Server-Sent Events: chunks, then `[DONE]` or an error."},
            "x-event-data": {"anyOf": [chunk, OpenAIError]},
        }
    return answer("The text, as one answer or, with `stream: true`, in chunks", content)


def _message(form: TextForm) -> Schema:
    """Messages of a pipeline with images, tools or reasoning have further parts and members."""
    is_plain = form.tools is None and form.reasoning is None
    schema, plain = schema_of(PlainMessage if is_plain else CallMessage), schema_of(PlainMessage)["properties"]
    if form.images is None:
        schema["properties"]["content"] = schema_of(str | list[TextPart] if is_plain else str | list[TextPart] | None)
    if form.tools is None and not is_plain:
        schema["properties"] |= {"role": plain["role"], "tool_calls": plain["tool_calls"]}
        del schema["properties"]["tool_call_id"]
    return schema


def _text_fields(pipeline: Pipeline, form: TextForm) -> Schema:
    """The fields that the gateway supports, and the values of other fields that have no effect."""
    fields = _neutral(NEUTRAL_OF_TEXTS)
    fields |= {
        "stop": schema_of(text_routes.Stop | None),
        "stream": enum_of([False, None]),
        "n": schema_of(text_routes.Choices | None),
    }
    if form.logprobs is not None:
        fields |= {
            "logprobs": schema_of(text_routes.Logprobs | None),
            "top_logprobs": schema_of(text_routes.Logprobs | None),
        }
    if pipeline.spec.stream is not None:
        fields |= {"stream": schema_of(bool | None), "stream_options": schema_of(text_routes.StreamOptions | None)}
    return fields


def _chat_fields(form: TextForm) -> Schema:
    """The fields that only chats have, and those that only pipelines with tools or reasoning have."""
    types: dict[str, Any] = {"response_format": ResponseFormat}
    if form.logprobs is not None:
        types["logprobs"] = bool
    if form.tools is not None:
        types |= {"tools": ToolList, "tool_choice": ToolChoice, "parallel_tool_calls": bool}
    if form.reasoning is not None:
        types |= {"chat_template_kwargs": dict[str, Any], "reasoning_effort": ReasoningEffort}
    return {name: schema_of(type_ | None) for name, type_ in types.items()}


def _neutral(neutral: Mapping[str, Neutral]) -> Schema:
    return {name: each.schema for name, each in neutral.items()}


def _schema(pipeline: Pipeline, form: TextForm | EmbeddingsForm, needed: Schema, fields: Schema) -> Schema:
    """Requires ``model``, ``needed`` and the pipeline's required fields other than the prompt."""
    known, ids = request_schema(pipeline), ids_of(pipeline)
    own = {name: known["properties"][field] for name, field in form.field_by_parameter.items() if name != "stop"}
    required = [name for name, field in form.field_by_parameter.items() if field in known.get("required", [])]
    model = enum_of(ids) if len(ids) > 1 else const_of(pipeline.name)
    return {
        "title": pipeline.name,
        "type": "object",
        "required": ["model", *needed, *required],
        "properties": {"model": model, **needed, **fields, **own},
        "additionalProperties": False,
    }


LIST_MODELS = Operation(
    "list_models", "openai", {200: json_answer("The models", OpenAIModelList)}, (errors.UpstreamUnavailable,)
)
GET_MODEL = Operation(
    "get_model",
    "openai",
    {200: json_answer("The model", OpenAIModel)},
    (errors.UnknownPipeline, errors.ModelNotReady, errors.UpstreamUnavailable),
    [in_path("name", TEXT)],
)
