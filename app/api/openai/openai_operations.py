"""Describes OpenAI's addresses, typed from the pipelines that declare ``openai:``.

The schemas of answers are the same for all models. Each model has its own request schema, with the fields of its
pipeline.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from app.api.error_table import lenient_status_of
from app.api.openai import text_routes as texts
from app.api.openai.chat_request import (
    CallMessage,
    PlainMessage,
    ReasoningEffort,
    ResponseFormat,
    TextPart,
    ToolChoice,
    ToolList,
)
from app.api.openai.embeddings import MAX_INPUTS, EmbeddingsRoute, Texts
from app.api.openai.requests import NEUTRAL_OF_EMBEDDINGS, NEUTRAL_OF_TEXTS, Door, ids_of
from app.api.openapi import (
    INFERENCE_ERRORS,
    TIMEOUT_HEADER,
    ErrorAnswers,
    Named,
    Operation,
    Visible,
    answer,
    in_path,
    json_answer,
    named,
)
from app.core import errors
from app.core.errors import GatewayError
from app.core.json import COUNT, TEXT, Schema, const_of, enum_of, list_of, object_of, one_of, schema_of
from app.pipelines.examples import example_of, request_schema
from app.pipelines.fields import TokenIds
from app.pipelines.openai_mapping import EmbeddingsForm, TextForm
from app.pipelines.pipeline import Pipeline

_NULL: Schema = {"type": "null"}
_PROBLEM = {"message": TEXT, "type": TEXT, "param": one_of([TEXT, _NULL], "anyOf"), "code": TEXT}
_ERROR = named("OpenAIError", {"error": named("OpenAIProblem", _PROBLEM)})
ERRORS = ErrorAnswers("OpenAIError", {"application/json": {"schema": _ERROR}}, lenient_status_of)
_MODEL = named("OpenAIModel", {"id": TEXT, "object": enum_of(["model"]), "created": COUNT, "owned_by": TEXT})
_MODELS = named("OpenAIModelList", {"object": enum_of(["list"]), "data": list_of(_MODEL)})

_DETAILS = "completion_tokens_details"
_REASONING = named("OpenAIReasoning", {"reasoning_tokens": COUNT})
_COUNTS = {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}
_USAGE = named("OpenAIUsage", {**_COUNTS, _DETAILS: _REASONING}, _DETAILS)
_FUNCTION = {"name": TEXT, "arguments": TEXT}
_CALL = {"id": TEXT, "type": enum_of(["function"]), "function": named("OpenAIFunction", _FUNCTION)}
_CALL_DELTA = {"index": COUNT, **_CALL, "function": named("OpenAIFunctionDelta", _FUNCTION, "name")}
_REASONED = {"reasoning": TEXT, "reasoning_content": TEXT}
_MESSAGE = {
    "role": enum_of(["assistant"]),
    "content": one_of([TEXT, _NULL], "anyOf"),
    "refusal": _NULL,
    "tool_calls": list_of(named("OpenAICall", _CALL)),
    **_REASONED,
}
_DELTA = {
    "role": enum_of(["assistant"]),
    "content": TEXT,
    "tool_calls": list_of(named("OpenAICallDelta", _CALL_DELTA, "id", "type")),
    **_REASONED,
}
_WRITTEN = {"message": named("OpenAIMessage", _MESSAGE, "tool_calls", *_REASONED)}
_OF_DELTA: Schema = {"description": "The members of a message that a chunk has."}
_WRITTEN_DELTA = {"delta": Named("OpenAIDelta", lambda: object_of(_DELTA, *_DELTA) | _OF_DELTA)}


def _answer(name: str, choice: str, object_: str, written: Schema, *reasons: str, is_chunk: bool = False) -> Named:
    """Only the last chunk of a choice has a finish reason, and only the last one of a stream has the usage."""
    reason = enum_of(["stop", "length", *reasons])
    members = {
        "index": COUNT,
        "logprobs": one_of([{"type": "object"}, _NULL], "anyOf"),
        "finish_reason": one_of([reason, _NULL], "anyOf") if is_chunk else reason,
        **written,
    }
    head = {"id": TEXT, "created": COUNT, "model": TEXT, "object": enum_of([object_])}
    usage = {"usage": one_of([_USAGE, _NULL], "anyOf") if is_chunk else _USAGE}
    return named(name, {**head, "choices": list_of(named(choice, members)), **usage}, "usage")


_TEXT = _answer("OpenAICompletion", "OpenAITextChoice", "text_completion", {"text": TEXT})
_TEXT_CHUNK = _answer(
    "OpenAICompletionChunk", "OpenAITextChunkChoice", "text_completion", {"text": TEXT}, is_chunk=True
)
_CHAT = _answer("OpenAIChatCompletion", "OpenAIChatChoice", "chat.completion", _WRITTEN, "tool_calls")
_CHAT_CHUNK = _answer(
    *("OpenAIChatCompletionChunk", "OpenAIChunkChoice", "chat.completion.chunk"),
    _WRITTEN_DELTA,
    "tool_calls",
    is_chunk=True,
)
_VECTOR = {
    "anyOf": [list_of({"type": "number"}), TEXT],
    "description": "Numbers, or base64 of little-endian 32-bit floats",
}
_EMBEDDING = {"object": enum_of(["embedding"]), "index": COUNT, "embedding": _VECTOR}
_INPUT_USAGE = named("OpenAIInputUsage", {"prompt_tokens": COUNT, "total_tokens": COUNT})
_EMBEDDINGS = {
    "object": enum_of(["list"]),
    "model": TEXT,
    "usage": _INPUT_USAGE,
    "data": list_of(named("OpenAIEmbedding", _EMBEDDING)),
}
Form = TypeVar("Form", TextForm, EmbeddingsForm)
Described = tuple[Schema, Schema]
"""The schema of a body, and an example without its ``model``."""


def tags_of(_visible: Visible) -> Mapping[str, str]:
    return {"openai": "The addresses of OpenAI's API"}


def completions(visible: Visible) -> Iterator[Operation]:
    def described(pipeline: Pipeline, form: TextForm) -> Described:
        fields = _text_fields(pipeline, form, {"echo": bool})
        schema = _schema(pipeline, form, {"prompt": schema_of(texts.OneText)}, fields)
        example = {"prompt": example_of(pipeline).get(form.prompt, "text")}
        return schema | {"dependentSchemas": {"stream_options": _NEEDS_STREAM}}, example

    ok = _text_answer(visible, texts.CompletionsRoute, _TEXT, _TEXT_CHUNK)
    yield from _inference(visible, texts.CompletionsRoute, ("create_completion", "Continue a text"), ok, described)


def chat(visible: Visible) -> Iterator[Operation]:
    def described(pipeline: Pipeline, form: TextForm) -> Described:
        messages = {"type": "array", "items": _message(form), "minItems": 1}
        types: dict[str, Any] = {"response_format": ResponseFormat}
        if form.openai.logprobs is not None:
            types["logprobs"] = bool
        if form.tools is not None:
            types |= {"tools": ToolList, "tool_choice": ToolChoice, "parallel_tool_calls": bool}
        if form.reasoning is not None:
            types |= {"chat_template_kwargs": dict[str, Any], "reasoning_effort": ReasoningEffort}
        schema = _schema(pipeline, form, {"messages": messages}, _text_fields(pipeline, form, types))
        if form.images is not None:  # they may be in the messages
            names = form.field_by_parameter
            schema["required"] = [name for name in schema["required"] if names.get(name) != form.images.input]
        limits = ("max_completion_tokens", "max_tokens")
        one_limit = {"anyOf": [{"properties": {name: {"type": "null"}}} for name in limits]}
        conditions = {"max_completion_tokens": one_limit, "stream_options": _NEEDS_STREAM}
        return schema | {"dependentSchemas": conditions}, {"messages": [{"role": "user", "content": "Hello"}]}

    ok = _text_answer(visible, texts.ChatRoute, _CHAT, _CHAT_CHUNK)
    further = (errors.ToolCallMissing, errors.FormatMismatch)
    yield from _inference(
        visible, texts.ChatRoute, ("create_chat_completion", "Answer a message"), ok, described, *further
    )


def embeddings(visible: Visible) -> Iterator[Operation]:
    def described(pipeline: Pipeline, form: EmbeddingsForm) -> Described:
        forms = [schema_of(str), schema_of(Texts)]
        if form.takes_tokens:
            tokens = schema_of(TokenIds)
            forms += [tokens, {"type": "array", "items": tokens, "minItems": 1, "maxItems": MAX_INPUTS}]
        fields = {name: each.schema for name, each in NEUTRAL_OF_EMBEDDINGS.items()}
        fields["encoding_format"] = schema_of(Literal["float", "base64"] | None)
        if form.length > 0:
            fields["dimensions"] = enum_of([form.length, None])
        example = {"input": [example_of(pipeline).get(form.input, "text")]}
        return _schema(pipeline, form, {"input": {"anyOf": forms}}, fields), example

    ok = json_answer("A vector for each text", named("OpenAIEmbeddings", _EMBEDDINGS, "usage"))
    yield from _inference(visible, EmbeddingsRoute, ("create_embedding", "Texts as vectors"), ok, described)


def _inference(
    visible: Visible,
    door: type[Door[Form]],
    title: tuple[str, str],
    ok: Schema,
    described: Callable[[Pipeline, Form], Described],
    *further: type[GatewayError],
) -> Iterator[Operation]:
    """``title``: the name of the operation, and its summary. Nothing for an address that no pipeline serves."""
    schemas: list[Schema] = []
    examples: Schema = {}
    for pipeline in visible.pipelines:
        if (form := door.form_of(pipeline)) is not None:
            schema, example = described(pipeline, form)
            schemas.append(schema)
            value = {"model": pipeline.name, **example}
            examples[pipeline.name] = {"summary": "A valid request", "value": value}
    if schemas:
        yield Operation(
            title[0],
            "openai",
            {200: ok},
            (errors.UnknownPipeline, *INFERENCE_ERRORS, *further),
            [TIMEOUT_HEADER],
            {"application/json": {"schema": one_of(schemas), "examples": examples}},
            summary=title[1],
            description="As OpenAI's API, so that its clients work. Fields that would change the answer are refused.",
        )


def _text_answer(visible: Visible, door: type[texts.TextRoute], whole: Named, chunk: Named) -> Schema:
    """``x-event-data`` has the types of a stream's events, which OpenAPI 3.1 cannot describe."""
    content: Schema = {"application/json": {"schema": whole}}
    if any(each.spec.stream is not None and door.form_of(each) is not None for each in visible.pipelines):
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Server-Sent Events: chunks, then `[DONE]` or an error."},
            "x-event-data": {"anyOf": [chunk, _ERROR]},
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


_NEEDS_STREAM: Schema = {
    "anyOf": [
        {"required": ["stream"], "properties": {"stream": const_of(True)}},
        {"properties": {"stream_options": {"type": "null"}}},
    ]
}


def _text_fields(pipeline: Pipeline, form: TextForm, own: Mapping[str, Any]) -> Schema:
    """The fields that the gateway supports, ``own`` of one address, and the values of those that have no effect."""
    types: dict[str, Any] = {"stop": texts.Stop, "stream": Literal[False], "n": texts.Choices}
    if form.openai.logprobs is not None:
        types |= {"logprobs": texts.Logprobs, "top_logprobs": texts.Logprobs}
    if pipeline.spec.stream is not None:
        types |= {"stream": bool, "stream_options": texts.StreamOptions}
    neutral = {name: each.schema for name, each in NEUTRAL_OF_TEXTS.items()}
    return neutral | {name: schema_of(type_ | None) for name, type_ in {**types, **own}.items()}


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
    "list_models", "openai", {200: json_answer("The models", _MODELS)}, (errors.UpstreamUnavailable,)
)
GET_MODEL = Operation(
    "get_model",
    "openai",
    {200: json_answer("The model", _MODEL)},
    (errors.UnknownPipeline, errors.ModelNotReady, errors.UpstreamUnavailable),
    [in_path("name", TEXT)],
)
