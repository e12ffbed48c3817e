"""The OpenAPI document: what it describes is true, code generators and linters understand it, and how it is kept.

``openapi.json`` pins the operations of the reference pipelines (tests/live/test_openapi.py).
"""

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest

from app.api import openapi
from app.core.json import Schema
from tests.api.conftest import CONFIG, FINAL, READER, events, scripted, scripted_fixture, word
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


api = scripted_fixture(CONFIG + "    openai: {completions: {prompt: prompt}}\n")


@pytest.fixture
async def document(api: Served) -> Any:
    return (await api.client.get("/openapi.json")).json()


async def test_the_events_of_a_stream_fit_their_schemas(api: Served, document: Any) -> None:
    api.engine.answers = [word(b"a", 1), FINAL]
    answer = await api.client.post("/v1/pipelines/write/stream", json={"prompt": "x"})
    for (_, _, data), name in zip(events(answer), ("write_output", "Done"), strict=True):
        jsonschema.Draft202012Validator(document["components"]["schemas"][name]).validate(data)


async def test_examples_and_descriptions_fit_their_schemas(api: Served, document: Any) -> None:
    for name in ("read", "write"):
        content = document["paths"][f"/v1/pipelines/{name}"]["post"]["requestBody"]["content"]["application/json"]
        body = content["examples"]["sample"]["value"]
        schema = document["components"]["schemas"][f"{name}_request"]
        jsonschema.Draft202012Validator(schema).validate(body)
        api.gateway.inference.catalog.pipeline(name).request_of_json(json.dumps(body).encode())
        answer = document["paths"][f"/v1/pipelines/{name}"]["get"]["responses"]["200"]["content"]["application/json"]
        assert answer["schema"] == {"$ref": "#/components/schemas/PipelineDescription"}
        described = document | answer["schema"]
        jsonschema.Draft202012Validator(described).validate((await api.client.get(f"/v1/pipelines/{name}")).json())
    start = document["paths"]["/v1/streams"]["post"]["requestBody"]["content"]["application/json"]
    assert start["examples"]["write"]["value"] == {"pipeline": "write", "inputs": {"prompt": "It's <here> & now"}}


async def test_pipelines_that_are_not_ready_are_omitted(api: Served) -> None:
    api.gateway.inference.catalog.entries["write"].compiled = None
    assert "/v1/pipelines/write" not in await paths(api)


def test_code_generators_can_read_the_schemas(document: Any) -> None:
    """hey-api drops ``null`` from an enum without ``type``, and no generator can write enums of objects."""
    enums = [schema for schema in schemas_in(document) if "enum" in schema or "const" in schema]
    assert len(enums) > 50
    for schema in enums:
        assert "type" in schema, schema
        for value in schema.get("enum", [schema.get("const")]):
            assert not isinstance(value, (dict, list))
            jsonschema.Draft202012Validator({"type": schema["type"]}).validate(value)
    arrays = [schema for schema in schemas_in(document) if schema.get("type") == "array"]
    assert arrays
    assert all(isinstance(schema.get("items"), dict) for schema in arrays)
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


def test_the_document_has_a_server_a_license_and_described_tags(document: Any) -> None:
    assert document["servers"] == [{"url": "/", "description": "This gateway"}]
    assert document["info"]["license"] == {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    assert document["info"]["description"]
    assert document["security"] == []
    assert "securitySchemes" not in document["components"], "the gateway has no keys"
    described = {tag["name"]: tag["description"] for tag in document["tags"]}
    assert all(described.values())
    assert (list(described)[:2], list(described)[-1]) == (["read", "write"], "health")
    for path in document["paths"].values():
        for operation in path.values():
            assert set(operation["tags"]) <= described.keys()
            assert operation["summary"]
            assert operation["description"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the documents that are built."""
    monkeypatch.setattr(openapi, "document_of", counting := Mock(wraps=openapi.document_of))
    return counting


async def paths(api: Served, **headers: str) -> set[str]:
    return set((await api.client.get("/openapi.json", headers=headers)).json()["paths"])


async def test_the_document_is_built_again_if_the_file_or_a_model_changes(api: Served, built: Mock) -> None:
    catalog, first = api.gateway.inference.catalog, await api.client.get("/openapi.json")
    await catalog.refresh()
    second = await api.client.get("/openapi.json")
    assert (first.content, first.headers["content-type"]) == (second.content, "application/json")
    assert built.call_count == 1
    assert "/v1/pipelines/other" not in await paths(api)
    assert catalog.path is not None
    catalog.path.write_text(CONFIG + "  other: {model: reader, warmup: false}\n")
    await catalog.refresh()
    await catalog.warm_up()
    assert "/v1/pipelines/other" in await paths(api)
    assert built.call_count == 2
    api.engine.configs["reader"] = model(
        ["IMAGE BYTES [1]", "NOTE BYTES [1] optional"], ["TEXT BYTES [1]", "SCORES INT32 [-1]"], name="reader"
    )
    assert api.engine.configs["reader"] != READER
    await catalog.refresh()
    await paths(api)
    assert built.call_count == 3


async def test_models_found_without_a_file_keep_the_document(built: Mock) -> None:
    async with served(FakeEngine.of(READER)) as api:
        await paths(api)
        await api.gateway.inference.catalog.refresh()
        await paths(api)
        assert built.call_count == 1


async def test_each_scope_has_its_document(built: Mock) -> None:
    keys = [entry("all"), *(entry(name, pipelines=["read"]) for name in ("reads", "reads_too"))]
    async with scripted(keys=[*keys, entry("speaks", dialects=["oip"])]) as api:
        for _ in range(2):
            assert "/v1/pipelines/write" in await paths(api, **bearer("all"))
            assert "/v1/pipelines/write" not in await paths(api, **bearer("reads"))
            assert "/v1/pipelines/write" not in await paths(api, **bearer("reads_too"))
            assert "/v1/pipelines/read" not in await paths(api, **bearer("speaks"))
    assert built.call_count == 3


async def test_the_kept_documents_are_bounded(built: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = [entry(f"k{number}", pipelines=["read", f"p{number}"]) for number in range(4)]
    async with scripted(keys=scopes) as api:
        size = len((await api.client.get("/openapi.json", headers=bearer("k0"))).content)
        monkeypatch.setattr(openapi, "MAX_KEPT_BYTES", 2 * size)
        for key_id in ("k1", "k0", "k2", "k0"):
            await paths(api, **bearer(key_id))
        assert built.call_count == 3  # k0 was used more recently than k1
        await paths(api, **bearer("k1"))
        assert built.call_count == 4
        monkeypatch.setattr(openapi, "MAX_KEPT_BYTES", 1)
        for _ in range(2):
            await paths(api, **bearer("k3"))
        assert built.call_count == 5
