"""OpenAPI 3.1 of what the gateway serves now, typed for each pipeline from its model's live configuration."""

from app import __version__
from app.api.openapi.answers import COMPONENTS, Schema
from app.api.openapi.fixed_paths import FIXED_PATHS, describe_operation, streams_path
from app.api.openapi.pipeline_paths import paths_of, schemas_of
from app.pipelines.catalog import Catalog


def openapi_of(catalog: Catalog) -> Schema:
    pipelines = [entry.pipeline for entry in catalog.entries.values() if entry.pipeline is not None]
    paths: Schema = {**FIXED_PATHS, **streams_path(pipelines)}
    schemas: Schema = dict(COMPONENTS["schemas"])
    for pipeline in pipelines:
        paths |= paths_of(pipeline, describe_operation(pipeline))
        schemas |= schemas_of(pipeline)
    return {
        "openapi": "3.1.0",
        "info": {"title": "triton-gateway", "version": __version__},
        "paths": paths,
        "components": {**COMPONENTS, "schemas": schemas},
    }
