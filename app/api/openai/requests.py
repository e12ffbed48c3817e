"""What all addresses share: the models, requests whose body names one of them, the members of bodies, and errors.

Every POST begins with :meth:`Door.open`. A new address is a subclass of ``Door``: its part of ``openai:``, how its
members become requests to the pipeline, and its answer. The gateway reads some members itself, and checks and ignores
others (``Neutral``); the rest are fields of the pipeline.

Source: OpenAI's clients. The classes of their errors depend on the status; for retries they first read
``X-Should-Retry``.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta
from starlette.responses import Response

from app.admission.keys import ANYONE, Key
from app.api.bodies import Limits, check_size, off_loop, read_json_of_any
from app.api.call import Inference
from app.api.endpoint import Found
from app.api.error_table import headers_of, lenient_status_of, problem_of
from app.api.exchange import Exchange, JsonResponse, check_pipeline
from app.codecs.json_scan import has_more_elements, malformed, members_of
from app.core.answer import Values
from app.core.errors import FieldProblem, GatewayError, InvalidInput, UnknownPipeline
from app.core.json import schema_of
from app.core.text import nearest, shown
from app.pipelines.body import Body, is_null, problem_of_value, refused
from app.pipelines.catalog import Catalog
from app.pipelines.openai_mapping import EmbeddingsForm, TextForm
from app.pipelines.pipeline import Pipeline

MAX_TEXT_CHARACTERS = 1024
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
Labels = Annotated[dict[_Key, _Value], Meta(max_length=16)]
"""The limits are OpenAI's."""
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NOT_SUPPORTED = "is not supported by this model"
_ZERO, _ONE = (Annotated[float, Meta(ge=each, le=each)] for each in (0, 1))
_NO_ITEMS = Annotated[list[Any], Meta(max_length=0)]
_TEXT_FORMAT = msgspec.defstruct("_TextFormat", [("type", Literal["text"])], forbid_unknown_fields=True)
_TEXT_MODALITY = Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)]


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that does not change the answer, with the type of the accepted values.

    No model has these fields: the gateway checks their type and ignores them. A field that the pipeline declares under
    the same name is the pipeline's. docs/reference/openai.md lists these fields, and
    docs/decisions/0019-openai-dialect.md has the reasons.

    ``meaning``: for docs/reference/openai.md. ``is_default``: other values would change the answer.
    """

    meaning: str
    type: Any
    is_default: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the accepted values."""
        return {**schema_of(self.type | None), "description": self.meaning}


NEUTRAL_OF_EMBEDDINGS: Mapping[str, Neutral] = {
    "metadata": Neutral("up to 16 labels, texts of up to 64 characters with texts of up to 512", Labels),
    "prompt_cache_key": Neutral("a text; the gateway has no cache of prompts", _Text),
    "prompt_cache_options": Neutral("an object like `metadata`", Labels),
    "prompt_cache_retention": Neutral("a text", _Text),
    "safety_identifier": Neutral("a text", _Text),
    "service_tier": Neutral("a text; priorities come from the API key", _Text),
    "store": Neutral("true or false; nothing is stored", bool),
    "user": Neutral("a text", _Text),
}
"""Fields about the caller, the price and the storage of a request."""

NEUTRAL_OF_TEXTS: Mapping[str, Neutral] = {
    **NEUTRAL_OF_EMBEDDINGS,
    "best_of": Neutral("only 1", _ONE, is_default=True),
    "echo": Neutral("only `false`; of chats", Literal[False], is_default=True),
    "frequency_penalty": Neutral("only 0", _ZERO, is_default=True),
    "function_call": Neutral("only `none` and `auto`", Literal["none", "auto"], is_default=True),
    "functions": Neutral("only `[]`", _NO_ITEMS, is_default=True),
    "ignore_eos": Neutral("only `false`", Literal[False], is_default=True),
    "logit_bias": Neutral("only `{}`", Annotated[dict[str, Any], Meta(max_length=0)], is_default=True),
    "logprobs": Neutral("only `false`", Literal[False], is_default=True),
    "min_tokens": Neutral("only 0", _ZERO, is_default=True),
    "modalities": Neutral('only `["text"]`', _TEXT_MODALITY, is_default=True),
    "parallel_tool_calls": Neutral("true or false; there are no tools", bool),
    "prediction": Neutral("an object; the answer is generated without it", dict[str, Any]),
    "presence_penalty": Neutral("only 0", _ZERO, is_default=True),
    "reasoning_effort": Neutral("only `none`", Literal["none"], is_default=True),
    "response_format": Neutral('only `{"type": "text"}`; of completions', _TEXT_FORMAT, is_default=True),
    "suffix": Neutral("only an empty text", Annotated[str, Meta(max_length=0)], is_default=True),
    "tool_choice": Neutral("only `none` and `auto`", Literal["none", "auto"], is_default=True),
    "tools": Neutral("only `[]`", _NO_ITEMS, is_default=True),
    "top_logprobs": Neutral("only 0", _ZERO, is_default=True),
    "top_p": Neutral("only 1", _ONE, is_default=True),
    "verbosity": Neutral("`low`, `medium` or `high`", Literal["low", "medium", "high"]),
}


Members = dict[str, memoryview]
"""The members that are not null, as JSON."""
Value = TypeVar("Value")

MAX_MEMBERS = 256
MAX_ELEMENTS = 64
"""Limit of the values and members nested in one member, because each uses more memory than its text."""


def read_members(body: Body) -> Members:
    """Reads the members of a body in OpenAI's form.

    Raises InvalidJson, InvalidRequest, or InvalidInput for a member that is given twice.
    """
    members: Members = {}
    for name, text in members_of(memoryview(body)):
        if name in members:
            raise refused([FieldProblem(shown(name), "is given twice")])
        if len(members) == MAX_MEMBERS:
            raise refused([FieldProblem("body", f"has more than {MAX_MEMBERS} fields")])
        members[name] = text
    return {name: text for name, text in members.items() if not is_null(text)}


def check_size_of(members: Members, name: str, max_bytes: int) -> None:
    """Raises InvalidInput."""
    if len(members.get(name, b"")) > max_bytes:
        raise refused([FieldProblem(name, f"has more than {max_bytes} bytes")])


def take(members: Members, name: str, type_: Any, default: Value, *, max_elements: int = MAX_ELEMENTS) -> Value:
    """Takes a member out. Raises InvalidInput or InvalidJson."""
    text = members.pop(name, None)
    if text is None:
        return default
    if len(text) > 2 * max_elements and has_more_elements(text, max_elements):
        raise refused([FieldProblem(name, f"has more than {max_elements} elements")])
    try:
        value: Value = msgspec.json.decode(text, type=type_)
    except msgspec.ValidationError as exc:
        raise refused([problem_of_value(name, str(exc))]) from exc
    except (ValueError, RecursionError) as exc:
        raise malformed() from exc
    return value


def required(name: str) -> InvalidInput:
    return refused([FieldProblem(name, "is required")])


Form = TypeVar("Form", bound=TextForm | EmbeddingsForm)


@dataclass(frozen=True, slots=True)
class NamedRequest(Generic[Form]):
    """The members of a body and their model. It refers to the body: an answer must not keep it."""

    pipeline: Pipeline
    form: Form
    model_id: str
    """The pipeline's name, or ``name:adapter``."""
    body: memoryview
    members: Members
    name_by_field: dict[str, str]
    """The pipeline's fields -> the names under which the caller knows them."""

    def body_of(self, fields: Mapping[str, Body], neutral: Mapping[str, Neutral]) -> bytes:
        """Returns the pipeline's JSON body: ``fields``, and each member under its name in the pipeline.

        The members in ``neutral`` are checked and omitted.

        Raises InvalidInput for members that the pipeline has no field for, and InvalidJson.
        """
        problems: list[FieldProblem] = []
        found: dict[str, Body] = dict(fields)
        for name, text in self.members.items():
            if (field := self.form.field_by_parameter.get(name)) is not None:
                if field in found:
                    problems.append(FieldProblem(name, "is given twice, under two names"))
                else:
                    found[field], self.name_by_field[field] = text, name
            elif (known := neutral.get(name)) is None:
                problems.append(FieldProblem(shown(name), NOT_SUPPORTED))
            else:
                try:
                    take({name: text}, name, known.type, None)
                except InvalidInput as exc:
                    problems += [FieldProblem(name, NOT_SUPPORTED)] if known.is_default else exc.errors
        if problems:
            raise refused(problems)
        pieces: list[Body] = []
        for name, value in found.items():
            pieces += [b"," if pieces else b"{", msgspec.json.encode(name), b":", value]
        return b"".join([*pieces, b"}"])


class Door(Generic[Form]):
    """An address whose body names its model."""

    part: ClassVar[Literal["completions", "chat", "embeddings"]]
    """What the pipeline declares under ``openai:``."""
    operation: ClassVar[str]
    """OpenTelemetry's name of what the address does."""

    def __init__(self, inference: Inference, limits: Limits) -> None:
        self.inference = inference
        self.limits = limits

    @classmethod
    def form_of(cls, pipeline: Pipeline) -> Form | None:
        """Returns None if the pipeline does not serve the address."""
        form: Form | None = getattr(pipeline.openai, cls.part, None)
        return form

    async def open(self, exchange: Exchange) -> NamedRequest[Form]:
        """Reads the members of the body and finds the named model. The request counts as work from here.

        Raises Forbidden, Draining, TooManyRequests, UnknownPipeline or ModelNotReady, and what is wrong with the body.
        """
        inference, limits = self.inference, self.limits
        exchange.record.transport = "unary"
        inference.workload.begin(exchange)
        inference.check_load_of_any(exchange, lambda each: each.longest_timeout_s if self.form_of(each) else None)
        served = (each for each in inference.allowed(exchange) if self.form_of(each) is not None)
        body = await read_json_of_any(exchange, limits, served)
        members = await off_loop(read_members, body, exchange)
        model = take(members, "model", str, "")
        if not model:
            raise required("model")
        name = checked_model(exchange, inference.catalog, model)
        exchange.record.operation = self.operation
        pipeline = inference.admit(exchange, name, "unary")
        check_size(len(body), limits.of(pipeline))
        form = self.form_of(pipeline)
        if form is None:
            raise UnknownPipeline(
                f"The model '{name}' does not serve `{self.part}`.",
                hint="`openai:` of the pipeline in gateway.yaml declares what it serves.",
            )
        names = {field: name for name, field in reversed(list(form.field_by_parameter.items()))}
        return NamedRequest(pipeline, form, model, body, members, names)


class OpenAIModels:
    """``/v1/models``: the pipelines that declare ``openai:``, and their adapters, as models."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._created = int(time.time())

    async def list_models(self, exchange: Exchange, _found: Found) -> Response:
        """The models.

        The pipelines that declare `openai:`.
        """
        self._catalog.check_known()
        models = [self._model(name) for name in models_of(self._catalog, exchange.key)]
        return JsonResponse({"object": "list", "data": models})

    async def get_model(self, exchange: Exchange, found: Found) -> Response:
        """One model.

        A pipeline that declares `openai:`.
        """
        name = found["name"]
        pipeline = checked_model(exchange, self._catalog, name)
        if self._catalog.pipeline(pipeline).openai is None:
            raise UnknownPipeline(
                f"Pipeline '{pipeline}' does not declare `openai:`.", hint="GET /v1/models lists the models."
            )
        return JsonResponse(self._model(name))

    def _model(self, name: str) -> Values:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "triton-gateway"}


def models_of(catalog: Catalog, key: Key = ANYONE) -> list[str]:
    """The ids of the models whose pipeline is known, and that the key allows."""
    pipelines = (entry.pipeline for name, entry in catalog.entries.items() if key.allows(name))
    served = [each for each in pipelines if each is not None and each.openai is not None]
    return [model for each in served for model in ids_of(each)]


def ids_of(pipeline: Pipeline) -> list[str]:
    """The pipeline's name, and ``name:adapter`` for each adapter."""
    return [pipeline.name, *(f"{pipeline.name}:{adapter}" for adapter in pipeline.spec.adapters)]


def checked_model(exchange: Exchange, catalog: Catalog, model: str) -> str:
    """Returns the name of the pipeline. Raises Forbidden, or UnknownPipeline for an id that no model has."""
    name, colon, adapter = model.partition(":")
    check_pipeline(exchange, catalog, name)
    catalog.check_known()
    entry = catalog.entries.get(name)
    pipeline = None if entry is None else entry.pipeline
    if entry is None or (colon and (pipeline is None or adapter not in pipeline.spec.adapters)):
        raise UnknownPipeline(f"There is no model with this id{nearest(model, models_of(catalog))[:512]}")
    return name


_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@contextmanager
def openai_names(name_by_field: Mapping[str, str]) -> Iterator[None]:
    """Gives the fields of an error in the block the caller's names. A path inside the value may follow a field."""

    def named(problem: FieldProblem) -> FieldProblem:
        for field, name in name_by_field.items():
            rest = problem.field.removeprefix(field)
            if not rest or (rest != problem.field and rest[0] in ".["):
                return FieldProblem(name + rest, problem.problem)
        return problem

    try:
        yield
    except GatewayError as exc:
        if exc.errors:
            is_about_first = exc.detail.startswith(f"'{exc.errors[0].field}' ")
            exc.errors = tuple(map(named, exc.errors))
            if is_about_first:
                exc.detail = refused(exc.errors).detail
        raise


def openai_error_of(error: GatewayError, request_id: str) -> Values:
    """The body of an error, and the last event of a failed stream. At most 4 KiB, as for problem objects."""
    problem, status = problem_of(error, request_id), lenient_status_of(type(error))
    first = next(iter(problem.get("errors", ())), None)
    return {
        "error": {
            "message": " ".join(text for text in (problem["detail"], problem.get("hint")) if text),
            "type": _TYPE_BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error"),
            "param": first["field"] if first else None,
            "code": "model_not_found" if isinstance(error, UnknownPipeline) else error.code,
        }
    }


def openai_error_response(error: GatewayError, request_id: str) -> Response:
    headers = {"X-Should-Retry": "true" if error.retryable else "false"} | headers_of(error)
    body = orjson.dumps(openai_error_of(error, request_id))
    return Response(body, lenient_status_of(type(error)), headers, "application/json")
