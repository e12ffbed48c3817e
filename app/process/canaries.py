"""Canaries made of the samples of the catalog's pipelines."""

from collections.abc import Iterator, Sequence

from app.domain.errors import GatewayError
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline
from app.triton.canaries import Canary


class SampleCanaries:
    """Pipelines without a ``sample``, or with ``warmup: false``, have no canary."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def all(self) -> Sequence[Canary]:
        by_model = {canary.request.model: canary for pipeline in self._pipelines() for canary in self._of(pipeline)}
        return list(by_model.values())

    def _pipelines(self) -> Iterator[Pipeline]:
        for entry in self._catalog.entries.values():
            if entry.pipeline is not None and entry.pipeline.spec.sample is not None and entry.pipeline.spec.warmup:
                yield entry.pipeline

    def _of(self, pipeline: Pipeline) -> Iterator[Canary]:
        try:
            request = pipeline.request_of_json(self._catalog.sample_body(pipeline))
        except (GatewayError, OSError, TypeError, ValueError):
            return  # the catalog reports a sample that cannot be used
        yield Canary(request, pipeline.config.decoupled)
