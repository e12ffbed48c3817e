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
        pipelines = [entry.pipeline for entry in self.catalog.entries.values() if entry.pipeline is not None]
        sampled = [each for each in pipelines if each.spec.sample is not None and each.spec.warmup]
        found = (canary for pipeline in sampled for canary in _of(pipeline, pipelines, self.catalog))
        return list({canary.request.model: canary for canary in found}.values())


def _of(pipeline: Pipeline, pipelines: Sequence[Pipeline], catalog: Catalog) -> Iterator[Canary]:
    try:
        request = pipeline.request_of_json(sample_body(pipeline, catalog.folder))
    except (GatewayError, OSError, TypeError, ValueError):
        return  # the catalog reports a sample that cannot be used
    models = pipeline.graph.models
    timeouts_s = [each.longest_timeout_s for each in pipelines if not models.isdisjoint(each.graph.models)]
    deadline_s = max(catalog.surroundings.timeout_s, *timeouts_s)
    yield Canary(replace(request, is_probe=True), pipeline.config.decoupled, models, deadline_s)
