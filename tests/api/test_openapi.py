"""The OpenAPI document: its operations, the form that code generators and linters understand, and how it is kept."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from app.api import documentation
from app.core.json import Schema
from tests.api.conftest import CONFIG, FINAL, READER, events, scripted, word
from tests.api.test_docs import refs_of
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served
from tests.toolkit.keys import bearer, entry
from tests.toolkit.models import model

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


def found(document: Any, ref: str) -> Any:
    for part in ref.removeprefix("#/").split("/"):
        document = document[part]
    return document


class TestOpenApi:
    def test_each_pipeline_has_a_typed_operation(self, document: Any) -> None:
        assert document["openapi"] == "3.1.0"
        assert {"/v1/pipelines/read", "/v1/pipelines/write", "/v1/pipelines/write/stream"} <= document["paths"].keys()
        assert "/v1/pipelines/read/stream" not in document["paths"]
        read = document["paths"]["/v1/pipelines/read"]["post"]
        assert read["requestBody"]["content"].keys() >= {"application/json", "multipart/form-data"}
        assert "X-Early-Exit" in read["responses"]["200"]["headers"]

    def test_every_reference_resolves(self, document: Any) -> None:
        assert all(found(document, ref) for ref in refs_of(document))

    def test_operation_ids_are_unique(self, document: Any) -> None:
        names = [
            op["operationId"] for path in document["paths"].values() for op in path.values() if "operationId" in op
        ]
        assert len(names) == len(set(names))

    async def test_a_stream_is_text_with_the_schemas_of_its_events(self, api: Served, document: Any) -> None:
        for operation in (
            document["paths"]["/v1/pipelines/write/stream"]["post"],
            document["paths"]["/v1/streams/{id}"]["get"],
        ):
            content = operation["responses"]["200"]["content"]["text/event-stream"]
            assert content["schema"]["type"] == "string"
            assert list(content["x-event-schemas"]) == ["output", "done", "error"]
        api.engine.answers = [word(b"a", 1), FINAL]
        answer = await api.client.post("/v1/pipelines/write/stream", json={"prompt": "x"})
        for (_, _, data), name in zip(events(answer), ("write_output", "Done"), strict=True):
            jsonschema.Draft202012Validator(document["components"]["schemas"][name]).validate(data)

    async def test_the_examples_are_accepted(self, api: Served, document: Any) -> None:
        for name in ("read", "write"):
            content = document["paths"][f"/v1/pipelines/{name}"]["post"]["requestBody"]["content"]["application/json"]
            body = content["examples"]["sample"]["value"]
            schema = document["components"]["schemas"][f"{name}_request"]
            jsonschema.Draft202012Validator(schema).validate(body)
            api.gateway.inference.catalog.pipeline(name).request_of_json(json.dumps(body).encode())
        start = document["paths"]["/v1/streams"]["post"]["requestBody"]["content"]["application/json"]
        assert start["examples"]["write"]["value"] == {"pipeline": "write", "inputs": {"prompt": "It's <here> & now"}}

    async def test_raw_bodies_are_listed_where_they_are_accepted(self, api: Served) -> None:
        paths = (await api.client.get("/openapi.json")).json()["paths"]
        accepted = {
            name: set(paths[f"/v1/pipelines/{name}"]["post"]["requestBody"]["content"]) for name in ("read", "write")
        }
        assert accepted["write"] == {"application/json"}
        assert accepted["read"] == {"application/json", "multipart/form-data", "image/*", "application/octet-stream"}

    def test_every_possible_status_is_listed(self, document: Any) -> None:
        run = document["paths"]["/v1/pipelines/read"]["post"]["responses"]
        assert list(run) == ["200", "400", "408", "413", "415", "422", "429", "431", "500", "502", "503", "504"]
        assert {"Retry-After", "X-Request-ID"} <= found(document, run["503"]["$ref"])["headers"].keys()
        assert "`invalid_json`" in found(document, run["400"]["$ref"])["description"]
        assert "410" in document["paths"]["/v1/streams/{id}"]["get"]["responses"]

    async def test_pipelines_that_are_not_ready_are_omitted(self, api: Served) -> None:
        api.gateway.inference.catalog.entries["write"].compiled = None
        document = (await api.client.get("/openapi.json")).json()
        assert "/v1/pipelines/write" not in document["paths"]


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
    assert document["security"] == []
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


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The documents that were built."""
    documents: list[Any] = []
    build = documentation.document_of

    def counted(*arguments: Any, **options: Any) -> Any:
        documents.append(build(*arguments, **options))
        return documents[-1]

    monkeypatch.setattr(documentation, "document_of", counted)
    return documents


async def paths(api: Served, **headers: str) -> set[str]:
    return set((await api.client.get("/openapi.json", headers=headers)).json()["paths"])


async def test_the_document_is_built_once(api: Served, built: list[Any]) -> None:
    first = await api.client.get("/openapi.json")
    await api.gateway.inference.catalog.refresh()
    second = await api.client.get("/openapi.json")
    assert (first.content, first.headers["content-type"]) == (second.content, "application/json")
    assert first.json() == built[0]
    assert len(built) == 1


async def test_models_found_without_a_file_keep_the_document(built: list[Any]) -> None:
    async with served(FakeEngine.of(READER)) as api:
        await paths(api)
        await api.gateway.inference.catalog.refresh()
        await paths(api)
        assert len(built) == 1


async def test_a_changed_file_changes_the_document(api: Served, built: list[Any]) -> None:
    catalog = api.gateway.inference.catalog
    assert "/v1/pipelines/other" not in await paths(api)
    assert catalog.path is not None
    catalog.path.write_text(CONFIG + "  other: {model: reader, warmup: false}\n")
    await catalog.refresh()
    await catalog.warm_up()
    assert "/v1/pipelines/other" in await paths(api)
    assert len(built) == 2


async def test_a_changed_model_changes_the_document(api: Served, built: list[Any]) -> None:
    await paths(api)
    api.engine.configs["reader"] = model(
        ["IMAGE BYTES [1]", "NOTE BYTES [1] optional"], ["TEXT BYTES [1]", "SCORES INT32 [-1]"], name="reader"
    )
    assert api.engine.configs["reader"] != READER
    await api.gateway.inference.catalog.refresh()
    await paths(api)
    assert len(built) == 2


async def test_each_scope_has_its_document(tmp_path: Path, built: list[Any]) -> None:
    keys = [
        entry("all"),
        entry("reads", pipelines=["read"]),
        entry("reads_too", pipelines=["read"]),
        entry("speaks", dialects=["oip"]),
    ]
    async with scripted(tmp_path, keys=keys) as api:
        for _ in range(2):
            assert "/v1/pipelines/write" in await paths(api, **bearer("all"))
            assert "/v1/pipelines/write" not in await paths(api, **bearer("reads"))
            assert "/v1/pipelines/write" not in await paths(api, **bearer("reads_too"))
            assert "/v1/pipelines/read" not in await paths(api, **bearer("speaks"))
    assert len(built) == 3


async def test_the_kept_documents_are_bounded(
    tmp_path: Path, built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scopes = [entry(f"k{number}", pipelines=["read", f"p{number}"]) for number in range(4)]
    async with scripted(tmp_path, keys=scopes) as api:
        size = len((await api.client.get("/openapi.json", headers=bearer("k0"))).content)
        monkeypatch.setattr(documentation, "MAX_KEPT_BYTES", 2 * size)
        for key_id in ("k1", "k0", "k2", "k0"):
            await paths(api, **bearer(key_id))
        assert len(built) == 3  # k0 was used more recently than k1
        await paths(api, **bearer("k1"))
        assert len(built) == 4
        monkeypatch.setattr(documentation, "MAX_KEPT_BYTES", 1)
        for _ in range(2):
            await paths(api, **bearer("k3"))
        assert len(built) == 5
