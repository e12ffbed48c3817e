"""The operations of OpenAI's addresses."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from app.api.error_table import ROW_BY_ERROR
from app.api.openai.errors import openai_status_of
from app.api.openai.openapi.requests import chat_schema, completion_schema, embeddings_schema, example_text_of
from app.api.openapi.answers import ANYWHERE, REFUSED, answer, headers_of_errors, json_answer, operation
from app.api.openapi.inference import INFERENCE_ERRORS, TIMEOUT_HEADER
from app.domain import errors
from app.domain.errors import GatewayError
from app.domain.json_schema import Schema, const_of, one_of
from app.pipelines.openai.form import EmbeddingsForm, TextForm
from app.pipelines.pipeline import Pipeline

Form = TypeVar("Form", TextForm, EmbeddingsForm)
_ERROR_REF: Schema = {"$ref": "#/components/schemas/OpenAIError"}
_ERROR: Schema = {"application/json": {"schema": _ERROR_REF}}
_NAME: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}

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
    ok = _text_answer("OpenAIChatCompletion", served)
    post = _inference("create_chat_completion", "Answer a message", _body(served, chat_schema, examples), ok)
    return {"/v1/chat/completions": {"post": post}}


def embeddings_path(served: Sequence[tuple[Pipeline, EmbeddingsForm]]) -> Schema:
    examples = {
        pipeline.name: {"model": pipeline.name, "input": [example_text_of(pipeline, form.input)]}
        for pipeline, form in served
    }
    ok = json_answer("A vector for each text", {"$ref": "#/components/schemas/OpenAIEmbeddings"})
    post = _inference("create_embedding", "Texts as vectors", _body(served, embeddings_schema, examples), ok)
    return {"/v1/embeddings": {"post": post}}


def _body(
    served: Sequence[tuple[Pipeline, Form]], schema_of: Callable[[Pipeline, Form], Schema], examples: Schema
) -> Schema:
    schemas = [schema_of(pipeline, form) for pipeline, form in served]
    named = {name: {"summary": "A valid request", "value": value} for name, value in examples.items()}
    return {"required": True, "content": {"application/json": {"schema": one_of(schemas), "examples": named}}}


def _inference(operation_id: str, summary: str, body: Schema, ok: Schema) -> Schema:
    answers = {"200": ok, **_failures(errors.UnknownPipeline, *INFERENCE_ERRORS)}
    return operation(operation_id, "openai", summary, _LIKE_OPENAI, answers, TIMEOUT_HEADER) | {"requestBody": body}


def _text_answer(name: str, served: Sequence[tuple[Pipeline, TextForm]]) -> Schema:
    """``x-event-data`` has the types of a stream's events, which OpenAPI 3.1 cannot describe."""
    content: Schema = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    if any(pipeline.spec.stream is not None for pipeline, _ in served):
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Server-Sent Events: chunks, then `[DONE]` or an error."},
            "x-event-data": {"anyOf": [{"$ref": f"#/components/schemas/{name}Chunk"}, _ERROR_REF]},
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
    return answer(text, _ERROR, *headers_of_errors(found))


REFUSALS: Schema = {str(openai_status_of(error)): _failure([error]) for error in REFUSED}


def _list_models() -> Schema:
    schema: Schema = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": const_of("list"),
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/OpenAIModel"}},
        },
    }
    answers = {"200": json_answer("The models", schema), **_failures()}
    return operation("list_models", "openai", "The models", "The pipelines that declare `openai:`.", answers)


def _get_model() -> Schema:
    ok = json_answer("The model", {"$ref": "#/components/schemas/OpenAIModel"})
    answers = {"200": ok, **_failures(errors.UnknownPipeline, errors.ModelNotReady)}
    return operation("get_model", "openai", "One model", "A pipeline that declares `openai:`.", answers, _NAME)


MODEL_PATHS: Schema = {"/v1/models": {"get": _list_models()}, "/v1/models/{name}": {"get": _get_model()}}
