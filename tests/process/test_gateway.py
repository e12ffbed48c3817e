"""Background work of a gateway: the refresh of its catalog, its gauges, and what is logged once.

Settings for a Triton that is not local, and the canaries of the pipelines.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from app.admission.keys import FollowedKeys
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.process import gateway
from app.process.gateway import Refresh, complaints
from app.process.tritons import Declarations
from app.routes import DIALECTS
from app.settings import Settings, SettingsError, check_credentials, credentials_of
from app.triton.credentials import TlsFiles
from tests.toolkit.certificates import Authority
from tests.toolkit.engine import FakeEngine
from tests.toolkit.keys import entry, write_keys
from tests.toolkit.models import ensemble, model

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


@pytest.mark.parametrize(
    "hostile",
    [
        "[" * 20_000,
        "pipelines: {p: {model: plain, parameters: {X: {type: integer}}}}",
        "pipelines: {p: {model: plain, parameters: {n: {type: number, minimum: " + "9" * 400 + "}}}}",
    ],
    ids=lambda text: text[:60],
)
async def test_neither_an_unusable_file_nor_a_silent_triton_ends_the_reloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: str
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pipelines: {p: {model: plain}}")
    engine = FakeEngine.of(PLAIN)
    async with refreshed(engine, path) as (catalog, metrics):
        await become("model_ready", metrics, 1, model="plain")
        path.write_text(hostile)
        await become("config_reload_failed", metrics, 1)
        assert catalog.is_ready
        path.write_text("pipelines: {p: {model: plain}, q: {model: plain}}")
        await become_true(lambda: "q" in catalog.entries and catalog.entries["q"].pipeline is not None)
        await become("config_reload_failed", metrics, 0)
        monkeypatch.setattr(engine, "is_live", asyncio.Event().wait)
        path.write_text("[")
        await become("config_reload_failed", metrics, 1)
        path.write_text("pipelines: {p: {model: plain}}")
        await become("config_reload_failed", metrics, 0)
        assert catalog.entries.keys() == {"p"}


async def test_an_unexpected_exception_is_logged_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pipelines: {p: {model: plain}}")
    engine = FakeEngine.of(PLAIN)
    monkeypatch.setattr(engine, "is_live", AsyncMock(side_effect=ZeroDivisionError))
    async with refreshed(engine, path) as (catalog, metrics):
        await become_true(lambda: "ZeroDivisionError" in caplog.text)
        monkeypatch.setattr(engine, "is_live", AsyncMock(return_value=True))
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


AWAY = "triton.example:8001"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    tls = Authority(tmp_path).files("gateway.example")
    (tmp_path / "token").write_text("secret")
    return {"ca": str(tls.authorities), "cert": tls.certificate, "key": tls.key, "token": tmp_path / "token"}


def settings_of(files: dict[str, Any], *names: str, **more: Any) -> Settings:
    setting = {"ca": "triton_ca", "cert": "triton_cert", "key": "triton_key", "token": "triton_token_file"}
    return Settings(**({"triton_url": AWAY} | {setting[name]: files[name] for name in names} | more))


@pytest.mark.parametrize(
    ("names", "more", "expected"),
    [
        ("ca cert", {}, "GATEWAY_TRITON_CERT and GATEWAY_TRITON_KEY belong together"),
        ("ca key", {}, "GATEWAY_TRITON_CERT and GATEWAY_TRITON_KEY belong together"),
        ("cert key", {}, "GATEWAY_TRITON_CERT needs GATEWAY_TRITON_CA"),
        ("ca", {"embedded": True}, "GATEWAY_TRITON_CA and GATEWAY_TRITON_TOKEN_FILE are not for the embedded Triton"),
        ("token", {"embedded": True}, "are not for the embedded Triton"),
        ("ca", {"triton_url": "unix:/run/triton"}, "GATEWAY_TRITON_CA is not for an address that begins with unix:"),
        ("token", {}, "GATEWAY_TRITON_TOKEN_FILE: the token would travel to triton.example:8001 unencrypted"),
        ("token", {"triton_url": "127.0.0.1:1, 10.0.0.1:1"}, "the token would travel to 10.0.0.1:1 unencrypted"),
        ("", {"triton_ca": "/nowhere/ca.pem"}, "/nowhere/ca.pem: cannot be read: No such file or directory"),
        ("ca", {"triton_token_file": Path("/nowhere/token")}, "/nowhere/token: cannot be read"),
    ],
)
def test_invalid_combinations_are_errors(
    files: dict[str, Any], names: str, more: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        check_credentials(settings_of(files, *names.split(), **more))
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ("", {}),
        ("ca", {}),
        ("ca cert key token", {}),
        ("", {"triton_ca": "system"}),
        ("token", {"triton_url": "127.0.0.1:8001"}),
        ("token", {"triton_url": "[::1]:8001,localhost:8001"}),
        ("token", {"triton_url": "unix:/run/triton"}),
        ("", {"embedded": True}),
    ],
)
def test_valid_combinations_are_accepted(files: dict[str, Any], names: str, more: dict[str, Any]) -> None:
    check_credentials(settings_of(files, *names.split(), **more))


def test_credentials_are_read_from_the_settings(files: dict[str, Any]) -> None:
    assert credentials_of(settings_of(files)).tls is None
    assert credentials_of(settings_of(files, triton_ca="system")).tls == TlsFiles()
    whole = credentials_of(settings_of(files, "ca", "cert", "key", "token"))
    assert whole.tls == TlsFiles(Path(files["ca"]), files["cert"], files["key"])
    assert whole.token_file == files["token"]


STEP, UNRELATED = (model("X FP32 [1]", "Y FP32 [1]", name=name) for name in ("step", "unrelated"))


async def declarations_of(folder: Path, pipelines: str) -> Declarations:
    (folder / "gateway.yaml").write_text(f"pipelines: {pipelines}")
    catalog = Catalog(FakeEngine.of(ensemble("chain", STEP), STEP, UNRELATED), folder / "gateway.yaml")
    catalog.load_file()
    await catalog.refresh()
    return Declarations(catalog)


async def test_a_pipeline_with_steps_is_no_canary_because_triton_has_no_such_model(tmp_path: Path) -> None:
    steps = "p: {steps: {a: {model: step, inputs: {X: X}}}, sample: {X: [1]}}"
    declarations = await declarations_of(tmp_path, f"{{{steps}, q: {{model: step, sample: {{X: [1]}}}}}}")
    assert [*declarations.canaries()] == ["step"]


@pytest.mark.parametrize(
    ("other", "deadline_s"),
    [
        ("model: step, timeout_s: 300", 300.0),
        ("model: step, timeout_s: 20, stream: {timeout_s: 400}", 400.0),
        ("model: step, timeout_s: 1", 30.0),
        ("model: unrelated, timeout_s: 300", 30.0),
    ],
)
async def test_the_deadline_is_the_longest_of_the_pipelines_that_share_a_model(
    tmp_path: Path, other: str, deadline_s: float
) -> None:
    """30 s is the deadline of requests that name a model in place of a pipeline."""
    sampled = "{model: chain, timeout_s: 2, sample: {X: [1.0]}}"
    declared = await declarations_of(tmp_path, f"{{sampled: {sampled}, other: {{{other}}}}}")
    (canary,) = declared.canaries().values()
    assert (canary.request.model, canary.deadline_s) == ("chain", deadline_s)


@pytest.mark.parametrize(
    ("model", "first_output_s", "engine_errors"),
    [("chain", 300.0, ["A", "B", "C"]), ("step", 300.0, []), ("unrelated", 0.0, ["D"])],
)
async def test_a_model_has_the_longest_first_output_time_and_the_engine_errors_of_its_pipelines(
    tmp_path: Path, model: str, first_output_s: float, engine_errors: list[str]
) -> None:
    """A pipeline over an ensemble declares the messages of the ensemble, and not those of its steps."""
    pipelines = (
        "{long: {model: chain, stream: {first_output_s: 300}, engine_errors: [A, B]}, "
        "two: {model: chain, engine_errors: [C]}, short: {model: step, stream: true}, "
        "steps: {steps: {a: {model: unrelated, inputs: {X: X}}}, engine_errors: [D]}}"
    )
    declared = (await declarations_of(tmp_path, pipelines)).of(model)
    assert (declared.first_output_s, declared.engine_errors) == (first_output_s, engine_errors)
