"""``/v1/models``: the pipelines that declare ``openai:``, and their adapters, as models."""

import time
from typing import Annotated, Literal, TypedDict

from msgspec import Meta
from starlette.responses import Response

from app.admission.keys import Key
from app.api.access import allows_pipeline, check_pipeline
from app.api.endpoint import Found
from app.api.exchange import Exchange, JsonResponse
from app.core.errors import UnknownPipeline
from app.core.text import nearest
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline

OWNER = "triton-gateway"


class OpenAIModel(TypedDict):
    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(ge=0)]
    owned_by: str


class OpenAIModelList(TypedDict):
    object: Literal["list"]
    data: list[OpenAIModel]


class OpenAIModels:
    """The pipelines that declare ``openai:``, as models."""

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
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}


def models_of(catalog: Catalog, key: Key | None = None) -> list[str]:
    """The ids of the models: the pipelines that declare ``openai:``, and each adapter as ``name:adapter``.

    Only pipelines whose model is known, and that the key allows.
    """
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
