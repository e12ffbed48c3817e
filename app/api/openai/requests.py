"""What all addresses of this dialect share: the models, requests whose body names one of them, and errors.

Every POST begins with :meth:`Door.open`. A new address is a subclass of ``Door``: its part of ``openai:``, how its
members become requests to the pipeline, and its answer.

Source: OpenAI's clients. The classes of their errors depend on the status; for retries they first read
``X-Should-Retry``.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, Literal, TypedDict, TypeVar

import msgspec
import orjson
from msgspec import Meta
from starlette.responses import Response

from app.admission.keys import Key
from app.api.access import allows_pipeline, check_pipeline
from app.api.bodies import Limits, check_size, off_loop, read_json_of_any
from app.api.call import Inference
from app.api.endpoint import Found
from app.api.error_table import ROW_BY_ERROR, headers_of, problem_of
from app.api.exchange import Exchange, JsonResponse
from app.api.openai.members import Members, Neutral, problems_of, read_members, required, take
from app.core.errors import FieldProblem, GatewayError, InvalidInput, UnknownPipeline
from app.core.text import nearest
from app.pipelines.body import Body, refused
from app.pipelines.catalog import Catalog
from app.pipelines.openai_mapping import EmbeddingsForm, TextForm
from app.pipelines.pipeline import Pipeline

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
            field = self.form.field_by_parameter.get(name)
            if field is None:
                problems += problems_of(name, text, neutral.get(name))
            elif field in found:
                problems.append(FieldProblem(name, "is given twice, under two names"))
            else:
                found[field] = text
                self.name_by_field[field] = name
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
    what: ClassVar[str]
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
                f"The model '{name}' does not serve {self.what}.",
                hint="`openai:` of the pipeline in gateway.yaml declares what it serves.",
            )
        names = {field: name for name, field in reversed(list(form.field_by_parameter.items()))}
        return NamedRequest(pipeline, form, model, body, members, names)


class OpenAIModel(TypedDict):
    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(ge=0)]
    owned_by: str


class OpenAIModelList(TypedDict):
    object: Literal["list"]
    data: list[OpenAIModel]


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
        return JsonResponse(OpenAIModelList(object="list", data=models))

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

    def _model(self, name: str) -> OpenAIModel:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "triton-gateway"}


def models_of(catalog: Catalog, key: Key | None = None) -> list[str]:
    """The ids of the models whose pipeline is known, and that the key allows."""
    pipelines = (entry.pipeline for name, entry in catalog.entries.items() if allows_pipeline(key, name))
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


class OpenAIProblem(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(TypedDict):
    error: OpenAIProblem


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


def openai_status_of(kind: type[GatewayError]) -> int:
    return 400 if kind is InvalidInput else ROW_BY_ERROR[kind].status


def openai_error_of(error: GatewayError, request_id: str) -> OpenAIError:
    """The body of an error, and the last event of a failed stream. At most 4 KiB, as for problem objects."""
    problem, status = problem_of(error, request_id), openai_status_of(type(error))
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
    return Response(body, openai_status_of(type(error)), headers, "application/json")
