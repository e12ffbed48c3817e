"""The part of the OpenAPI document about the pipelines, typed from their models' live configuration."""

from app.admission.keys import Key
from app.api.access import allows_pipeline
from app.api.openapi.answers import REFUSALS
from app.api.openapi.document import Described
from app.api.pipelines.openapi.catalog_paths import CATALOG_PATHS, CATALOG_SCHEMAS
from app.api.pipelines.openapi.events import DONE
from app.api.pipelines.openapi.explain_paths import EXPLAIN_PATHS
from app.api.pipelines.openapi.overview_paths import OVERVIEW_PATHS
from app.api.pipelines.openapi.pipeline_paths import paths_of, schemas_of
from app.api.pipelines.openapi.stream_paths import STREAM_PATHS, streams_path
from app.domain.json_schema import Schema
from app.pipelines.catalog import Catalog

_TAGS = {
    "catalog": "The pipelines, their numbers and their mistakes",
    "streams": "Streams that can be resumed",
    "requests": "Where the time of requests went",
}


def described(catalog: Catalog, key: Key | None) -> Described:
    entries = catalog.entries.items()
    pipelines = [entry.pipeline for name, entry in entries if entry.pipeline and allows_pipeline(key, name)]
    paths: Schema = {}
    schemas: Schema = {"Done": DONE, **CATALOG_SCHEMAS}
    for pipeline in pipelines:
        paths |= paths_of(pipeline)
        schemas |= schemas_of(pipeline)
    paths |= {**CATALOG_PATHS, **OVERVIEW_PATHS, **streams_path(pipelines), **EXPLAIN_PATHS, **STREAM_PATHS}
    tags = _TAGS | {each.name: each.spec.description or f"Model {each.spec.model}" for each in pipelines}
    return Described(paths, schemas, REFUSALS, bearer_paths=list(STREAM_PATHS), tags=tags)
