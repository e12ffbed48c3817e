"""What every POST of this dialect begins with: the members of the body, and the model that it names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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
    """A body that is not read further yet."""

    pipeline: Pipeline
    body: memoryview
    members: Members

    async def read(self, read: Callable[[], Read]) -> Read:
        """What ``read`` makes of the members; off the event loop if the body is large."""
        return await off_loop(lambda _body: read(), self.body)


async def asked_of(exchange: Exchange, inference: Inference, limits: Limits) -> Asked:
    """The request counts as work from here. Raises Draining, UnknownPipeline, ModelNotReady, or for a bad body."""
    exchange.record.transport = "unary"
    inference.workload.begin(exchange.work)
    body = await read_json(exchange, limits)
    members = await off_loop(read_members, body)
    model = take(members, "model", str, "")
    if not model:
        raise required("model")
    check_model(inference.catalog, model)
    return Asked(inference.admit(exchange, model, "unary"), body, members)


def models_of(catalog: Catalog) -> list[str]:
    """The pipelines that declare ``openai:``, and whose model is known."""
    entries = catalog.entries.items()
    return [name for name, entry in entries if entry.pipeline is not None and entry.pipeline.openai is not None]


def check_model(catalog: Catalog, name: str) -> None:
    """Raises UnknownPipeline for a name that no pipeline has."""
    if name not in catalog.entries:
        raise UnknownPipeline(f"There is no model with this id{nearest(name, models_of(catalog))[:512]}")


def form_of(pipeline: Pipeline, pick: Callable[[OpenAIForm], Form | None], what: str) -> Form:
    """``what``: the address in words. Raises UnknownPipeline."""
    form = None if pipeline.openai is None else pick(pipeline.openai)
    if form is None:
        raise UnknownPipeline(
            f"The model '{pipeline.name}' does not serve {what}.",
            hint="`openai:` of the pipeline in gateway.yaml declares what it serves.",
        )
    return form
