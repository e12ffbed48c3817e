"""The part of the OpenAPI document about ``/v2``, for the currently exposed models."""

from app.admission.keys import Key
from app.api.access import allows_model
from app.api.oip.openapi.answers import REFUSALS, RESPONSES
from app.api.oip.openapi.model_paths import paths_of, schemas_of
from app.api.oip.openapi.schemas import SCHEMAS
from app.api.oip.openapi.server_paths import HEALTH_PATHS, SERVER_PATHS, TAG, document_paths
from app.api.openapi.document import Described
from app.pipelines.catalog import Catalog


def described(catalog: Catalog, key: Key | None) -> Described:
    names = [name for name in catalog.exposed.names if allows_model(key, catalog, name)]
    paths, schemas = SERVER_PATHS | HEALTH_PATHS | document_paths(names), dict(SCHEMAS)
    for config in (each for each in catalog.exposed.configs if each.name in names):
        paths |= paths_of(config)
        schemas |= schemas_of(config)
    tags = {TAG: "The Open Inference Protocol"} | {name: f"Model {name}" for name in names}
    return Described(paths, schemas, REFUSALS, RESPONSES, keyless_paths=list(HEALTH_PATHS), tags=tags)
