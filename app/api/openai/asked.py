"""The first step of every POST of this dialect: the members of the body, and the named model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from app.admission.keys import Key
from app.api.access import allows_pipeline, check_pipeline
from app.api.bodies import off_loop, read_json
from app.api.exchange import Exchange
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.openai.members import Members, read_members, required, take
from app.domain.errors import UnknownPipeline
from app.domain.nearest import nearest
from app.pipelines.catalog import Catalog
from app.pipelines.openai.form import OpenAIForm
from app.pipelines.pipeline import Pipeline

Form = TypeVar("Form")
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Asked:
    """The members of a body and their model, before the members are decoded."""

    pipeline: Pipeline
    body: memoryview
    members: Members

    async def read(self, read: Callable[[], Read]) -> Read:
        """Returns ``read(members)``; runs in a thread if the body is large."""
        return await off_loop(lambda _body: read(), self.body)


Pick = Callable[[OpenAIForm], Form | None]
"""Returns the part of ``openai:`` that one address serves; None if the pipeline does not serve the address."""


async def asked_of(exchange: Exchange, inference: Inference, limits: Limits, pick: Pick[Any]) -> Asked:
    """The request counts as work from here.

    Raises Forbidden, Draining, TooManyRequests, UnknownPipeline or ModelNotReady, and what is wrong with the body.
    """
    exchange.record.transport = "unary"
    inference.workload.begin(exchange.work)
    inference.check_load_of_any(exchange, partial(_timeout_of, pick))
    body = await read_json(exchange, limits)
    members = await off_loop(read_members, body)
    model = take(members, "model", str, "")
    if not model:
        raise required("model")
    check_model(exchange, inference.catalog, model)
    return Asked(inference.admit(exchange, model, "unary"), body, members)


def models_of(catalog: Catalog, key: Key | None = None) -> list[str]:
    """The pipelines that declare ``openai:``, whose model is known, and that the key allows."""
    pipelines = (entry.pipeline for name, entry in catalog.entries.items() if allows_pipeline(key, name))
    return [each.name for each in pipelines if each is not None and each.openai is not None]


def check_model(exchange: Exchange, catalog: Catalog, name: str) -> None:
    """Raises Forbidden, or UnknownPipeline for a name that no pipeline has."""
    check_pipeline(exchange, catalog, name)
    if name not in catalog.entries:
        raise UnknownPipeline(f"There is no model with this id{nearest(name, models_of(catalog))[:512]}")


def _timeout_of(pick: Pick[Any], pipeline: Pipeline) -> float | None:
    """Returns the longest deadline of a request to the pipeline, whole or as a stream; None if it is not served."""
    if pipeline.openai is None or pick(pipeline.openai) is None:
        return None
    return pipeline.longest_timeout_s


def form_of(pipeline: Pipeline, pick: Pick[Form], what: str) -> Form:
    """``what``: a description of the address. Raises UnknownPipeline."""
    form = None if pipeline.openai is None else pick(pipeline.openai)
    if form is None:
        raise UnknownPipeline(
            f"The model '{pipeline.name}' does not serve {what}.",
            hint="`openai:` of the pipeline in gateway.yaml declares what it serves.",
        )
    return form
