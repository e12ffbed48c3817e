"""``/openapi.json`` is built once for each state of the catalog and each scope of keys."""

from pathlib import Path
from typing import Any

import pytest

from app.api import documentation
from tests.api.conftest import CONFIG, READER, scripted
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served
from tests.toolkit.keys import bearer, entry, write_keys
from tests.toolkit.models import model


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
    keys = write_keys(
        tmp_path / "keys.yaml",
        entry("all"),
        entry("reads", pipelines=["read"]),
        entry("reads_too", pipelines=["read"]),
        entry("speaks", dialects=["oip"]),
    )
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
    async with scripted(tmp_path, keys=write_keys(tmp_path / "keys.yaml", *scopes)) as api:
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
