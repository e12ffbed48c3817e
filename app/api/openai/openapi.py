"""Describes OpenAI's addresses in the OpenAPI document, typed from the pipelines that declare ``openai:``.

The schemas of answers are the same for all models. Each model has its own request schema, with the fields of its
pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec

from app.admission.keys import Key
from app.api.access import allows_pipeline
from app.api.error_table import ROW_BY_ERROR
from app.api.openai.embeddings import MAX_INPUTS
from app.api.openai.errors import openai_status_of
from app.api.openai.members import NEUTRAL_OF_EMBEDDINGS, NEUTRAL_OF_TEXTS, Labels, Neutral
from app.api.openai.messages import DETAILS
from app.api.openai.requests import MAX_CHOICES, MAX_LOGPROBS, ids_of
from app.api.openai.response_format import ResponseFormat
from app.api.openai.tools import ReasoningEffort, ToolChoice, ToolList
from app.api.openapi.answers import (
    ANYWHERE,
    INFERENCE_ERRORS,
    REFUSED,
    TIMEOUT_HEADER,
    answer,
    headers_of_errors,
    json_answer,
    operation,
    ref,
)
from app.api.openapi.document import Described
from app.core import errors
from app.core.errors import GatewayError
from app.core.json import COUNT, TEXT, Schema, const_of, enum_of, list_of, object_of, one_of, with_types
from app.pipelines.catalog import Catalog
from app.pipelines.examples import example_of
from app.pipelines.openai_mapping import EmbeddingsForm, TextForm
from app.pipelines.parameters import TokenIds
from app.pipelines.pipeline import Pipeline
from app.pipelines.schema import request_schema

_FINISH_REASON: Schema = enum_of(["stop", "length"])
_CHAT_FINISH_REASON: Schema = enum_of(["stop", "length", "tool_calls"])
_NO_LOGPROBS: Schema = {"type": "null"}


def _object(properties: Schema, *optional: str) -> Schema:
    return object_of(properties, *optional) | {"additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(name: str, choice: Schema, usage: Schema) -> Schema:
    head = {"id": TEXT, "object": const_of(name), "created": COUNT, "model": TEXT}
    return _object({**head, "choices": list_of(choice), "usage": usage}, "usage")


def _choice(content: Schema, finish_reason: Schema) -> Schema:
    return _object({"index": COUNT, **content, "logprobs": _NO_LOGPROBS, "finish_reason": finish_reason})


_FUNCTION: Schema = _object({"name": TEXT, "arguments": TEXT})
_CALL: Schema = _object({"id": TEXT, "type": const_of("function"), "function": _FUNCTION})
_REASONING: Schema = {"reasoning": TEXT, "reasoning_content": TEXT}
_MESSAGE = _object(
    {
        "role": const_of("assistant"),
        "content": _or_null(TEXT),
        "refusal": {"type": "null"},
        "tool_calls": list_of(_CALL),
        **_REASONING,
    },
    *("tool_calls", *_REASONING),
)
_CALL_PIECE: Schema = _object(
    {
        "index": COUNT,
        "id": TEXT,
        "type": const_of("function"),
        "function": _object({"name": TEXT, "arguments": TEXT}, "name"),
    },
    *("id", "type"),
)
_DELTA_MEMBERS: Schema = {"role": const_of("assistant"), "content": TEXT, "tool_calls": list_of(_CALL_PIECE)}
_DELTA = _object(_DELTA_MEMBERS | _REASONING, *_DELTA_MEMBERS, *_REASONING)
_TOKENS = {"prompt_tokens": COUNT, "total_tokens": COUNT}
_USAGE = ref("OpenAIUsage")
_EMBEDDING = _object(
    {
        "object": const_of("embedding"),
        "index": COUNT,
        "embedding": {"anyOf": [list_of({"type": "number"}), {**TEXT, "contentEncoding": "base64"}]},
    }
)
_ERROR = _object({"message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": TEXT})

ANSWERS: Schema = {
    "OpenAIError": _object({"error": _ERROR}),
    "OpenAIUsage": _object(
        {**_TOKENS, "completion_tokens": COUNT, "completion_tokens_details": _object({"reasoning_tokens": COUNT})},
        "completion_tokens_details",
    ),
    "OpenAIModel": _object({"id": TEXT, "object": const_of("model"), "created": COUNT, "owned_by": TEXT}),
    "OpenAICompletion": _answer("text_completion", _choice({"text": TEXT}, _FINISH_REASON), _USAGE),
    "OpenAICompletionChunk": _answer(
        "text_completion", _choice({"text": TEXT}, _or_null(_FINISH_REASON)), _or_null(_USAGE)
    ),
    "OpenAIChatCompletion": _answer("chat.completion", _choice({"message": _MESSAGE}, _CHAT_FINISH_REASON), _USAGE),
    "OpenAIChatCompletionChunk": _answer(
        "chat.completion.chunk", _choice({"delta": _DELTA}, _or_null(_CHAT_FINISH_REASON)), _or_null(_USAGE)
    ),
    "OpenAIEmbeddings": _object(
        {"object": const_of("list"), "model": TEXT, "usage": _object(_TOKENS), "data": list_of(_EMBEDDING)}, "usage"
    ),
}
"""The schemas of OpenAI's answers, with the members that this gateway writes."""


_ONE_TEXT: Schema = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 1}]}
_STOP_TEXT: Schema = {**TEXT, "minLength": 1, "maxLength": 256}
_LABELS: Schema = {"anyOf": [msgspec.json.schema(Labels), {"type": "null"}]}
_PART = _object({"type": const_of("text"), "text": TEXT, "prompt_cache_breakpoint": _LABELS}, "prompt_cache_breakpoint")
_DETAIL: Schema = {
    **enum_of([*DETAILS, None]),
    "description": "Has no effect: the model decides how it reads an image.",
}
_URL: Schema = {**TEXT, "description": "A data: URL with base64, or the address of a host that the operator allows."}
_IMAGE_PART = _object(
    {
        "type": const_of("image_url"),
        "image_url": _object({"url": _URL, "detail": _DETAIL}, "detail"),
        "prompt_cache_breakpoint": _LABELS,
    },
    "prompt_cache_breakpoint",
)
_REQUEST_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": enum_of(["system", "developer", "user", "assistant"]),
        "content": {"anyOf": [TEXT, {"type": "array", "items": _PART}]},
        "name": {"type": ["string", "null"]},
        **{name: {"type": "null"} for name in ("refusal", "audio", "function_call", "tool_calls", "annotations")},
    },
    "additionalProperties": False,
}


def _messages_of(form: TextForm) -> Schema:
    return {"type": "array", "items": _message_of(form), "minItems": 1}


def _message_of(form: TextForm) -> Schema:
    """Messages of a pipeline with images, tools or reasoning have further parts and members."""
    known = _REQUEST_MESSAGE["properties"]
    if form.images is not None:
        parts = {"type": "array", "items": {"anyOf": [_PART, _IMAGE_PART]}}
        known = {**known, "content": {"anyOf": [TEXT, parts]}}
    if form.tools is None and form.reasoning is None:
        return {**_REQUEST_MESSAGE, "properties": known}
    text: Schema = {"type": ["string", "null"]}
    properties = {**known, "content": _or_null(known["content"]), **dict.fromkeys(_REASONING, text)}
    if form.tools is not None:
        roles = enum_of([*known["role"]["enum"], "tool"])
        properties |= {"role": roles, "tool_calls": _or_null(list_of(_CALL)), "tool_call_id": text}
    return {**_REQUEST_MESSAGE, "required": ["role"], "properties": properties}


def _tool_fields(form: TextForm) -> Schema:
    """The fields of a chat that only pipelines with tools or reasoning have."""
    fields: Schema = {}
    if form.tools is not None:
        fields["tools"] = _or_null(_inlined(ToolList))
        fields["tool_choice"] = _or_null(_inlined(ToolChoice))
        fields["parallel_tool_calls"] = {"type": ["boolean", "null"]}
    if form.reasoning is not None:
        fields["chat_template_kwargs"] = {"type": ["object", "null"], "additionalProperties": True}
        fields["reasoning_effort"] = enum_of([*get_args(ReasoningEffort), None])
    return fields


_NOT_INLINED = {"title", "discriminator"}
"""Members of a schema that refer to the names of definitions, which are gone."""


def _inlined(type_: Any) -> Schema:
    """The JSON Schema of a type without references."""
    schema = msgspec.json.schema(type_)
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, dict) and "$ref" in value:
            return inlined(definitions[value["$ref"].rpartition("/")[2]])
        if isinstance(value, dict):
            return {name: inlined(member) for name, member in value.items() if name not in _NOT_INLINED}
        return [inlined(each) for each in value] if isinstance(value, list) else value

    found: Schema = inlined(schema)
    return with_types(found)


def completion_schema(pipeline: Pipeline, form: TextForm) -> Schema:
    schema = _schema(pipeline, form, {"prompt": _ONE_TEXT}, _text_fields(pipeline, form, chat=False))
    return schema | {"dependentSchemas": _OPTIONS_OF_STREAMS}


def chat_schema(pipeline: Pipeline, form: TextForm) -> Schema:
    schema = _schema(pipeline, form, {"messages": _messages_of(form)}, _text_fields(pipeline, form, chat=True))
    if form.images is not None:  # they may be in the messages
        schema["required"] = [
            name for name in schema["required"] if form.field_by_parameter.get(name) != form.images.input
        ]
    return schema | {"dependentSchemas": _ONE_LIMIT | _OPTIONS_OF_STREAMS}


def embeddings_schema(pipeline: Pipeline, form: EmbeddingsForm) -> Schema:
    texts = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_INPUTS}
    forms: list[Schema] = [TEXT, texts]
    if form.takes_tokens:
        tokens = with_types(msgspec.json.schema(TokenIds))
        forms += [tokens, {"type": "array", "items": tokens, "minItems": 1, "maxItems": MAX_INPUTS}]
    fields = _schemas_of(NEUTRAL_OF_EMBEDDINGS)
    fields["encoding_format"] = enum_of(["float", "base64", None])
    if form.length > 0:
        fields["dimensions"] = enum_of([form.length, None])
    return _schema(pipeline, form, {"input": {"anyOf": forms}}, fields)


def _schemas_of(neutral: Mapping[str, Neutral]) -> Schema:
    return {name: each.schema for name, each in neutral.items()}


def example_text_of(pipeline: Pipeline, field: str) -> Any:
    """The value of a field in the pipeline's example."""
    return example_of(pipeline).get(field, "text")


def _text_fields(pipeline: Pipeline, form: TextForm, *, chat: bool) -> Schema:
    """The fields that the gateway supports, and the values of other fields that have no effect."""
    stops: Schema = {"type": "array", "items": _STOP_TEXT, "maxItems": 4}
    fields = _schemas_of(NEUTRAL_OF_TEXTS)
    fields |= {"stop": {"anyOf": [_STOP_TEXT, stops, {"type": "null"}]}, "stream": enum_of([False, None])}
    fields["n"] = _integer_to(MAX_CHOICES, 1)
    if not chat:
        fields["echo"] = {"type": ["boolean", "null"]}
    else:
        fields["response_format"] = _or_null(_inlined(ResponseFormat))
    if form.logprobs is not None:
        fields |= {"logprobs": {"type": ["boolean", "null"]}, "top_logprobs": _integer_to(MAX_LOGPROBS)}
        fields |= {} if chat else {"logprobs": _integer_to(MAX_LOGPROBS)}
    if pipeline.spec.stream is not None:
        usage: Schema = {"type": ["boolean", "null"]}
        options = {"type": ["object", "null"], "properties": {"include_usage": usage}, "additionalProperties": False}
        fields |= {"stream": {"type": ["boolean", "null"]}, "stream_options": options}
    return fields | _tool_fields(form)


def _integer_to(most: int, least: int = 0) -> Schema:
    return {"type": ["integer", "null"], "minimum": least, "maximum": most}


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


def _schema(pipeline: Pipeline, form: TextForm | EmbeddingsForm, needed: Schema, fields: Schema) -> Schema:
    """Requires ``model``, ``needed`` and the pipeline's required fields other than the prompt."""
    known = request_schema(pipeline)
    own = {name: known["properties"][field] for name, field in form.field_by_parameter.items() if name != "stop"}
    required = [name for name, field in form.field_by_parameter.items() if field in known.get("required", [])]
    return {
        "title": pipeline.name,
        "type": "object",
        "required": ["model", *needed, *required],
        "properties": {"model": _model_of(pipeline), **needed, **fields, **own},
        "additionalProperties": False,
    }


def _model_of(pipeline: Pipeline) -> Schema:
    ids = ids_of(pipeline)
    return enum_of(ids) if len(ids) > 1 else const_of(pipeline.name)


Form = TypeVar("Form", TextForm, EmbeddingsForm)
_ERROR_REF: Schema = ref("OpenAIError")
_ERROR_ANSWER: Schema = {"application/json": {"schema": _ERROR_REF}}
_NAME: Schema = {"name": "name", "in": "path", "required": True, "schema": TEXT}

_LIKE_OPENAI = "As OpenAI's API, so that its clients work. Fields that would change the answer are refused."


def completions_path(served: Sequence[tuple[Pipeline, TextForm]]) -> Schema:
    examples = {
        pipeline.name: {"model": pipeline.name, "prompt": example_text_of(pipeline, form.prompt)}
        for pipeline, form in served
    }
    ok = _text_answer("OpenAICompletion", served)
    post = _inference("create_completion", "Continue a text", _body(served, completion_schema, examples), ok)
    return {"/v1/completions": {"post": post}}


def chat_path(served: Sequence[tuple[Pipeline, TextForm]]) -> Schema:
    examples = {
        pipeline.name: {"model": pipeline.name, "messages": [{"role": "user", "content": "Hello"}]}
        for pipeline, _ in served
    }
    ok, body = _text_answer("OpenAIChatCompletion", served), _body(served, chat_schema, examples)
    post = _inference(
        "create_chat_completion", "Answer a message", body, ok, errors.ToolCallMissing, errors.FormatMismatch
    )
    return {"/v1/chat/completions": {"post": post}}


def embeddings_path(served: Sequence[tuple[Pipeline, EmbeddingsForm]]) -> Schema:
    examples = {
        pipeline.name: {"model": pipeline.name, "input": [example_text_of(pipeline, form.input)]}
        for pipeline, form in served
    }
    ok = json_answer("A vector for each text", ref("OpenAIEmbeddings"))
    post = _inference("create_embedding", "Texts as vectors", _body(served, embeddings_schema, examples), ok)
    return {"/v1/embeddings": {"post": post}}


def _body(
    served: Sequence[tuple[Pipeline, Form]], schema_of: Callable[[Pipeline, Form], Schema], examples: Schema
) -> Schema:
    schemas = [schema_of(pipeline, form) for pipeline, form in served]
    named = {name: {"summary": "A valid request", "value": value} for name, value in examples.items()}
    return {"required": True, "content": {"application/json": {"schema": one_of(schemas), "examples": named}}}


def _inference(operation_id: str, summary: str, body: Schema, ok: Schema, *further: type[GatewayError]) -> Schema:
    answers = {"200": ok, **_failures(errors.UnknownPipeline, *INFERENCE_ERRORS, *further)}
    return operation(operation_id, "openai", summary, _LIKE_OPENAI, answers, TIMEOUT_HEADER) | {"requestBody": body}


def _text_answer(name: str, served: Sequence[tuple[Pipeline, TextForm]]) -> Schema:
    """``x-event-data`` has the types of a stream's events, which OpenAPI 3.1 cannot describe."""
    content: Schema = {"application/json": {"schema": ref(name)}}
    if any(pipeline.spec.stream is not None for pipeline, _ in served):
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Server-Sent Events: chunks, then `[DONE]` or an error."},
            "x-event-data": {"anyOf": [ref(f"{name}Chunk"), _ERROR_REF]},
        }
    return answer("The text, as one answer or, with `stream: true`, in chunks", content)


def _failures(*possible: type[GatewayError]) -> Schema:
    """The error answers by status, like :func:`app.api.openapi.answers.problems` for problem objects."""
    by_status: dict[int, list[type[GatewayError]]] = {}
    for error in dict.fromkeys((*possible, *ANYWHERE)):
        by_status.setdefault(openai_status_of(error), []).append(error)
    return {str(status): _failure(found) for status, found in sorted(by_status.items())}


def _failure(found: Sequence[type[GatewayError]]) -> Schema:
    text = " ".join(f"`{error.code}`: {ROW_BY_ERROR[error].meaning}" for error in found)
    return answer(text, _ERROR_ANSWER, *headers_of_errors(found))


REFUSALS: Schema = {str(openai_status_of(error)): _failure([error]) for error in REFUSED}


def _list_models() -> Schema:
    schema = object_of({"object": const_of("list"), "data": list_of(ref("OpenAIModel"))})
    answers = {"200": json_answer("The models", schema), **_failures(errors.UpstreamUnavailable)}
    return operation("list_models", "openai", "The models", "The pipelines that declare `openai:`.", answers)


def _get_model() -> Schema:
    ok = json_answer("The model", ref("OpenAIModel"))
    answers = {"200": ok, **_failures(errors.UnknownPipeline, errors.ModelNotReady, errors.UpstreamUnavailable)}
    return operation("get_model", "openai", "One model", "A pipeline that declares `openai:`.", answers, _NAME)


MODEL_PATHS: Schema = {"/v1/models": {"get": _list_models()}, "/v1/models/{name}": {"get": _get_model()}}


def described(catalog: Catalog, key: Key | None) -> Described:
    """Omits addresses that no pipeline serves."""
    entries = catalog.entries.items()
    pipelines = [entry.pipeline for name, entry in entries if entry.pipeline and allows_pipeline(key, name)]
    served = [(pipeline, pipeline.openai) for pipeline in pipelines if pipeline.openai is not None]
    completions = [(pipeline, form.completions) for pipeline, form in served if form.completions is not None]
    chats = [(pipeline, form.chat) for pipeline, form in served if form.chat is not None]
    embeddings = [(pipeline, form.embeddings) for pipeline, form in served if form.embeddings is not None]
    paths = {
        **MODEL_PATHS,
        **(completions_path(completions) if completions else {}),
        **(chat_path(chats) if chats else {}),
        **(embeddings_path(embeddings) if embeddings else {}),
    }
    return Described(paths, ANSWERS, REFUSALS, tags={"openai": "The addresses of OpenAI's API"})
