"""Fixtures for all tests, which share one real Triton and one real gateway."""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

from app.observability.log import LineWriter
from tests.toolkit.processes import WORKER, client, config_path, free_ports, gateway, repository, start_gateway, triton
from tests.toolkit.programs import RedisServer, has_redis

__all__ = ["client", "config_path", "gateway", "repository", "start_gateway", "triton"]

settings.register_profile("any machine", deadline=None)  # a deadline is a timed assertion
settings.load_profile("any machine")

httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)  # type: ignore[attr-defined]
"""All clients of the tests share one TLS context: loading the authorities for each takes 40 to 80 ms.

httpx has two public ways. ``verify`` would be an argument of each of 160 calls. ``SSL_CERT_FILE`` would also be in the
environment of the programs that tests start, and uv needs all authorities.
"""

Require = Callable[[object, str], None]

for _name in os.environ.setdefault(
    "SIGNALS_IGNORED_BY_TESTS",
    " ".join(each.name for each in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_IGN),
).split():
    # `nohup make test &` ignores these signals, and programs inherit that: gateways would not see the signals that the
    # tests send. They do not inherit a handler. The variable tells it to the processes of pytest-xdist.
    signal.signal(signal.Signals[_name], lambda *_: None)

LONG_FILES_FIRST = ("docs", "benchmarks", "live", "browser", "typescript", "zoo", "clients", "deploy", "helm")
"""Folders with files that take a minute: if one of them began last, it would run alone."""


def pytest_configure(config: pytest.Config) -> None:
    """Each worker of pytest-xdist begins to collect the suite with another folder.

    In a new checkout, compiling the tests takes longer than all imports. Each worker compiles its own share of the
    files, and then finds those of the others compiled.
    """
    gc.disable()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and config.args == ["tests"]:
        files = sorted(file.relative_to(config.rootpath) for file in (config.rootpath / "tests").rglob("test_*.py"))
        names = sorted({file.parts[1] for file in files})
        first = names.index(files[len(files) * (WORKER % workers) // workers].parts[1])
        config.args = [f"tests/{name}" for name in names[first:] + names[:first]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {config.rootpath / "tests" / name: place for place, name in enumerate(LONG_FILES_FIRST)}

    def place_of(item: pytest.Item) -> tuple[int, Path]:
        return min((rank[each] for each in item.path.parents if each in rank), default=len(rank)), item.path

    items.sort(key=place_of)


def pytest_collection_finish() -> None:
    """No garbage collection looks at the collected tests, which all live until the end."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Fails a test that leaves the gateway's log in this process: its descriptor may be a later test's socket."""
    yield
    left = [handler for handler in logging.root.handlers if isinstance(handler, LineWriter)]
    logging.root.handlers[:] = [handler for handler in logging.root.handlers if handler not in left]
    assert not left, "the test configured the log of this process"


@pytest.fixture(scope="session")
def require() -> Require:
    """`require(found, "there is no X")` skips the test if ``found`` is false; with REQUIRE_ALL=1 it fails."""

    def require(found: object, reason: str) -> None:
        if found:
            return
        if os.environ.get("REQUIRE_ALL") == "1":
            pytest.fail(f"REQUIRE_ALL=1, but {reason}")
        pytest.skip(reason)

    return require


@pytest.fixture(scope="session")
def models_venv(pytestconfig: pytest.Config, require: Require) -> Path:
    """The environment with the real Triton and the models' packages."""
    venv = pytestconfig.rootpath / ".venv-triton"
    require((venv / "bin" / "python3").exists(), "there is no .venv-triton: `make test` creates it")
    return venv


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory, require: Require) -> Iterator[RedisServer]:
    """A real Redis for the tests of one file."""
    require(has_redis(), "there is no redis-server: `make system-packages` installs it")
    (port,) = free_ports(1)
    server = RedisServer(tmp_path_factory.mktemp("redis"), port)
    server.start()
    yield server
    server.stop()
