"""What the OpenAPI document says of the pipelines, each typed from its model's live configuration."""

from app.api.openapi.answers import Schema
from app.api.openapi.document import Described
from app.api.pipelines.openapi.catalog_paths import CATALOG_PATHS, describe_operation
from app.api.pipelines.openapi.events import DONE
from app.api.pipelines.openapi.pipeline_paths import paths_of, schemas_of
from app.api.pipelines.openapi.stream_paths import STREAM_PATHS, streams_path
from app.pipelines.catalog import Catalog


def described(catalog: Catalog) -> Described:
    pipelines = [entry.pipeline for entry in catalog.entries.values() if entry.pipeline is not None]
    paths: Schema = {**CATALOG_PATHS, **STREAM_PATHS, **streams_path(pipelines)}
    schemas: Schema = {"Done": DONE}
    for pipeline in pipelines:
        paths |= paths_of(pipeline, describe_operation(pipeline))
        schemas |= schemas_of(pipeline)
    return Described(paths, schemas)
