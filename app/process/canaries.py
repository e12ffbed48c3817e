"""Provides the samples of the catalog's pipelines as canaries."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from app.domain.errors import GatewayError
from app.pipelines.catalog import Catalog
from app.pipelines.declared import sample_body
from app.pipelines.pipeline import Pipeline
from app.triton.canaries import Canary


class SampleCanaries:
    """Pipelines without a ``sample``, or with ``warmup: false``, have no canary."""

    def __init__(self, catalog: Catalog | None = None) -> None:
        self.catalog = catalog
        """None until the models are known."""

    def all(self) -> Sequence[Canary]:
        if self.catalog is None:
            return []
        found = (canary for pipeline in _sampled(self.catalog) for canary in _of(pipeline, self.catalog))
        return list({canary.request.model: canary for canary in found}.values())


def _sampled(catalog: Catalog) -> Iterator[Pipeline]:
    for entry in catalog.entries.values():
        if entry.pipeline is not None and entry.pipeline.spec.sample is not None and entry.pipeline.spec.warmup:
            yield entry.pipeline


def _of(pipeline: Pipeline, catalog: Catalog) -> Iterator[Canary]:
    try:
        request = pipeline.request_of_json(sample_body(pipeline, catalog.folder))
    except (GatewayError, OSError, TypeError, ValueError):
        return  # the catalog reports a sample that cannot be used
    yield Canary(replace(request, is_probe=True), pipeline.config.decoupled)
