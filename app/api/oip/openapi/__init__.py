"""What the OpenAPI document says of ``/v2``, for the models that are exposed now."""

from app.api.oip.openapi.answers import RESPONSES
from app.api.oip.openapi.model_paths import paths_of, schemas_of
from app.api.oip.openapi.schemas import SCHEMAS
from app.api.oip.openapi.server_paths import SERVER_PATHS, document_paths
from app.api.openapi.document import Described
from app.pipelines.catalog import Catalog


def described(catalog: Catalog) -> Described:
    paths, schemas = SERVER_PATHS | document_paths(catalog.exposed.names), dict(SCHEMAS)
    for config in catalog.exposed.configs:
        paths |= paths_of(config)
        schemas |= schemas_of(config)
    return Described(paths, schemas, RESPONSES)
