"""The OpenAPI document has the form that code generators and linters understand."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from app.core.json import Schema
from tests.api.conftest import CONFIG, scripted
from tests.toolkit.gateway import Served
from tests.toolkit.keys import bearer, entry, write_keys

DATA = {"example", "examples", "default", "enum", "const", "value"}
"""Keys of schemas with values that are no schemas."""
NAMED = {"properties", "schemas", "patternProperties", "dependentSchemas"}
"""Keys whose members have names of their own."""


def schemas_in(value: Any) -> Iterator[Schema]:
    if isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name in NAMED:
                for member in inner.values():
                    yield from schemas_in(member)
            elif name not in DATA:
                yield from schemas_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from schemas_in(inner)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    async with scripted(tmp_path, CONFIG + "    openai: {completions: {prompt: prompt}}\n") as gateway:
        yield gateway


@pytest.fixture
async def document(api: Served) -> Any:
    return (await api.client.get("/openapi.json")).json()


def test_every_enum_names_the_types_of_its_values(document: Any) -> None:
    """hey-api drops ``null`` from an enum without ``type``, and no generator can write enums of objects."""
    enums = [schema for schema in schemas_in(document) if "enum" in schema or "const" in schema]
    assert len(enums) > 50
    for schema in enums:
        assert "type" in schema, schema
        for value in schema.get("enum", [schema.get("const")]):
            assert not isinstance(value, (dict, list))
            jsonschema.Draft202012Validator({"type": schema["type"]}).validate(value)


def test_an_early_exit_is_a_reason_or_null(document: Any) -> None:
    early_exit = document["components"]["schemas"]["read_result"]["properties"]["early_exit"]
    assert (early_exit["type"], early_exit["enum"]) == (["string", "null"], ["no_text", None])


def test_every_array_has_items(document: Any) -> None:
    arrays = [schema for schema in schemas_in(document) if schema.get("type") == "array"]
    assert arrays
    assert all(isinstance(schema.get("items"), dict) for schema in arrays)


def test_no_choice_has_one_schema(document: Any) -> None:
    choices = [schema[name] for schema in schemas_in(document) for name in ("oneOf", "anyOf") if name in schema]
    assert choices
    assert all(len(choice) > 1 for choice in choices)


def test_fields_with_a_default_stay_optional(document: Any) -> None:
    """openapi-typescript requires properties that have a default next to their type."""
    schemas = document["components"]["schemas"]
    limit = schemas["read_request"]["properties"]["n"]
    assert "default" not in limit
    assert limit["anyOf"] == [{"type": "integer", "minimum": 1, "maximum": 9, "default": 3}, {"type": "null"}]
    for name, schema in schemas.items():
        for field in schema.get("properties", {}).values():
            assert "default" not in field, name


def test_raw_bytes_are_binary(document: Any) -> None:
    content = document["paths"]["/v1/pipelines/read"]["post"]["requestBody"]["content"]
    for media_type in ("image/*", "application/octet-stream"):
        assert content[media_type]["schema"] == {"type": "string", "format": "binary"}


def test_the_document_has_a_server_a_license_and_described_tags(document: Any) -> None:
    assert document["servers"] == [{"url": "/", "description": "This gateway"}]
    assert document["info"]["license"] == {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    assert document["info"]["description"]
    described = {tag["name"]: tag["description"] for tag in document["tags"]}
    assert all(described.values())
    for path in document["paths"].values():
        for operation in path.values():
            assert set(operation["tags"]) <= described.keys()
            assert operation["summary"]
            assert operation["description"]


def test_the_pipelines_are_listed_first(document: Any) -> None:
    names = [tag["name"] for tag in document["tags"]]
    assert names[:2] == ["read", "write"]
    assert names[-1] == "health"


async def test_the_description_of_a_pipeline_fits_its_schema(api: Served, document: Any) -> None:
    for name in ("read", "write"):
        answer = document["paths"][f"/v1/pipelines/{name}"]["get"]["responses"]["200"]["content"]["application/json"]
        assert answer["schema"] == {"$ref": "#/components/schemas/PipelineDescription"}
        described = document | answer["schema"]
        jsonschema.Draft202012Validator(described).validate((await api.client.get(f"/v1/pipelines/{name}")).json())


async def test_every_operation_has_its_security(api: Served, document: Any, tmp_path: Path) -> None:
    """Without keys the document says that no operation needs one."""
    assert document["security"] == []
    async with scripted(tmp_path, keys=write_keys(tmp_path / "keys.yaml", entry("all"))) as guarded:
        with_keys = (await guarded.client.get("/openapi.json", headers=bearer("all"))).json()
    run = with_keys["paths"]["/v1/pipelines/read"]["post"]
    assert run["security"] == [{"bearer": []}, {"apiKey": []}]
    assert {"401", "403"} <= run["responses"].keys()
