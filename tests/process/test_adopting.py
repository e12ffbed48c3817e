"""A gateway.yaml that is created after the start is loaded."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from app.pipelines.catalog import Catalog
from app.process import gateway
from app.process.gateway import adopt_when_made
from tests.toolkit.engine import FakeEngine
from tests.toolkit.models import model

PLAIN = model("X FP32 [1]", "Y FP32 [1]", name="plain")


@pytest.fixture(autouse=True)
def short_poll_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "POLL_S", 0.005)


async def until(catalog: Catalog, names: set[str]) -> None:
    async with asyncio.timeout(5):
        while {name for name, entry in catalog.entries.items() if entry.pipeline} != names:
            await catalog.refresh()
            await asyncio.sleep(0.005)


async def test_a_file_created_later_is_loaded_and_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "gateway.yaml"
    catalog = Catalog(FakeEngine.of(PLAIN))
    catalog.load_file()
    task = asyncio.create_task(adopt_when_made(catalog, path))
    try:
        await until(catalog, {"plain"})
        path.write_text("pipelines: {mine: {modle: plain}}")
        async with asyncio.timeout(5):
            while "did you mean 'model'?" not in caplog.text:
                await asyncio.sleep(0.005)
        await until(catalog, {"plain"})
        path.write_text("pipelines: {mine: {model: plain}}")
        await until(catalog, {"mine"})
        assert f"{path} is used from now on" in caplog.text
        path.write_text("pipelines: {yours: {model: plain}}")
        await until(catalog, {"yours"})
        assert caplog.text.count("cannot be used") == 1
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
