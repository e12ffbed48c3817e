"""Background work of a gateway: the refresh of its catalog, its gauges, and what is logged once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from app.admission.keys import FollowedKeys
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.process import gateway
from app.process.gateway import Refresh, complaints
from app.routes import DIALECTS
from tests.toolkit.engine import FakeEngine
from tests.toolkit.keys import entry, write_keys
from tests.toolkit.models import model

PLAIN = model("X FP32 [1]", "Y FP32 [1]", name="plain")


@pytest.fixture(autouse=True)
def short_poll_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FILE_POLL_S", "REFRESH_S", "REFRESH_UNREADY_S"):
        monkeypatch.setattr(gateway, name, 0.005)


@asynccontextmanager
async def refreshed(
    engine: FakeEngine, path: Path | None, late_file: Path | None = None
) -> AsyncIterator[tuple[Catalog, Metrics]]:
    catalog, metrics = Catalog(engine, path), Metrics("test")
    catalog.load_file()
    task = asyncio.create_task(Refresh(catalog, metrics, late_file=late_file).run())
    try:
        yield catalog, metrics
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def become(name: str, metrics: Metrics, value: float | None, **labels: str) -> None:
    await become_true(lambda: metrics.registry.get_sample_value(f"triton_gateway_{name}", labels) == value)


async def become_true(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


class SilentEngine(FakeEngine):
    async def is_live(self) -> bool:
        if not self.is_up:
            await asyncio.sleep(3600)
        return True


@pytest.mark.parametrize(
    "hostile",
    [
        "[" * 20_000,
        "pipelines: {p: {model: plain, parameters: {X: {type: integer}}}}",
        "pipelines: {p: {model: plain, parameters: {n: {type: number, minimum: " + "9" * 400 + "}}}}",
    ],
    ids=lambda text: text[:60],
)
async def test_neither_an_unusable_file_nor_a_silent_triton_ends_the_reloads(tmp_path: Path, hostile: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pipelines: {p: {model: plain}}")
    engine = SilentEngine.of(PLAIN)
    async with refreshed(engine, path) as (catalog, metrics):
        await become("model_ready", metrics, 1, model="plain")
        path.write_text(hostile)
        await become("config_reload_failed", metrics, 1)
        assert catalog.is_ready
        path.write_text("pipelines: {p: {model: plain}, q: {model: plain}}")
        await become_true(lambda: "q" in catalog.entries and catalog.entries["q"].pipeline is not None)
        await become("config_reload_failed", metrics, 0)
        engine.is_up = False
        path.write_text("[")
        await become("config_reload_failed", metrics, 1)
        path.write_text("pipelines: {p: {model: plain}}")
        await become("config_reload_failed", metrics, 0)
        assert catalog.entries.keys() == {"p"}


class FailingEngine(FakeEngine):
    async def is_live(self) -> bool:
        if not self.is_up:
            raise ZeroDivisionError
        return True


async def test_an_unexpected_exception_is_logged_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pipelines: {p: {model: plain}}")
    engine = FailingEngine.of(PLAIN)
    engine.is_up = False
    async with refreshed(engine, path) as (catalog, metrics):
        await become_true(lambda: "ZeroDivisionError" in caplog.text)
        engine.is_up = True
        await become("model_ready", metrics, 1, model="plain")
        assert catalog.is_ready


async def test_an_unloaded_model_is_not_ready(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pipelines: {p: {model: plain}, q: {model: other}}")
    engine = FakeEngine.of(PLAIN, model("X FP32 [1]", "Y FP32 [1]", name="other"))
    async with refreshed(engine, path) as (_, metrics):
        await become("model_ready", metrics, 1, model="other")
        engine.unready = {"other"}
        await become("model_ready", metrics, 0, model="other")
        path.write_text("pipelines: {p: {model: plain}}")
        await become("model_ready", metrics, None, model="other")


async def test_a_file_created_later_is_loaded_and_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "gateway.yaml"

    async def until(names: set[str]) -> None:
        await become_true(lambda: {name for name, entry in catalog.entries.items() if entry.pipeline} == names)

    async with refreshed(FakeEngine.of(PLAIN), None, path) as (catalog, _):
        await until({"plain"})
        path.write_text("pipelines: {mine: {modle: plain}}")
        await become_true(lambda: "did you mean 'model'?" in caplog.text)
        assert catalog.entries.keys() == {"plain"}
        path.write_text("pipelines: {mine: {model: plain}}")
        await until({"mine"})
        assert f"{path} is used from now on" in caplog.text
        path.write_text("pipelines: {yours: {model: plain}}")
        await until({"yours"})
        assert caplog.text.count("cannot be used") == 1


FILE = """
pipelines:
  p: {model: m, limits: {in_flight: 2, per_key: 3}}
  q: {model: n, limits: {in_flight: 4}}
  write: {model: o}
oip: {models: [tool]}
"""
EACH = "but each of the 4 processes runs at least 1 request: together they run up to 4"
UNKNOWN = ["the API key 'a' allows 'wriet', which this gateway does not serve; did you mean 'write'?"]
EXCEEDED = [
    f"limits.in_flight of the pipeline 'p' is 2, {EACH}",
    f"limits.per_key of the pipeline 'p' is 3, {EACH}",
    f"limits.in_flight of the API key 'a' is 1, {EACH}",
]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "gateway.yaml").write_text(FILE)
    catalog = Catalog(FakeEngine(), tmp_path / "gateway.yaml")
    catalog.load_file()
    return catalog


@pytest.fixture
def keys(tmp_path: Path) -> FollowedKeys:
    keys = {"a": (["q", "wriet"], {"in_flight": 1}), "b": (["tool"], {"in_flight": 9}), "c": (None, {"queue": 1})}
    entries = [entry(key, **{"pipelines": names} if names else {}, limits=each) for key, (names, each) in keys.items()]
    return FollowedKeys(write_keys(tmp_path / "keys.yaml", *entries), DIALECTS)


async def test_unknown_names_and_limits_below_the_number_of_workers_are_logged_once(
    catalog: Catalog, keys: FollowedKeys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(complaints(catalog, None, 1))
    assert not list(complaints(Catalog(FakeEngine()), keys, 1))
    monkeypatch.setattr(gateway, "FILE_POLL_S", 0.001)
    refresh = Refresh(catalog, Metrics("test"), keys, processes=4, has_checked=True)
    running = asyncio.create_task(refresh.run())
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.wait([running])
    assert [each.getMessage() for each in caplog.records if each.name == gateway.__name__] == [*UNKNOWN, *EXCEEDED]
