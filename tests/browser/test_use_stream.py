"""The React hook ``samples/useStream.ts`` in a page of another origin, with StrictMode."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.conftest import Require
from tests.toolkit.environments import ROOT
from tests.toolkit.http_server import served
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.waiting import eventually
from tests.typescript.building import built_client

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def origin(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a server with the page."""
    folder = tmp_path_factory.mktemp("app")
    shutil.copy(built_client(require) / "page.js", folder)
    (folder / "index.html").write_text(
        '<!doctype html><title>app</title><div id="root"></div><script src="page.js"></script>'
    )
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def gateway_of_app(
    triton: EmbeddedTriton, origin: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    settings = {"triton_url": triton.grpc_url, "config": str(ROOT / "gateway.yaml"), "cors_origins": origin}
    with running_gateway(tmp_path_factory.mktemp("gateway"), **settings) as gateway:
        yield gateway


@pytest.fixture
def app(browser: Chrome, origin: str, gateway_of_app: GatewayProcess) -> Callable[[], ConsolePage]:
    def opened() -> ConsolePage:
        browser.get(f"{origin}/index.html?gateway={gateway_of_app.url}")
        page = ConsolePage(browser)
        page.wait_for("#state")
        return page

    return opened


def tokens(gateway: GatewayProcess) -> str:
    body = {"prompt": "The for statement", "max_tokens": 512, "temperature": 0}
    answer = httpx.post(f"{gateway.url}/v1/pipelines/write", json=body, timeout=60).json()
    return " ".join(map(str, answer["token_id"]))


def active_streams(gateway: GatewayProcess) -> int:
    statistics: dict[str, Any] = httpx.get(f"{gateway.url}/v1/statistics").json()
    return int(statistics["pipelines"]["write"]["active_streams"])


@contextmanager
def stopped(triton: EmbeddedTriton) -> Iterator[Callable[[], None]]:
    """Stops Triton. Yields a function that lets it run for 10 ms."""
    assert triton.pid
    pid = triton.pid

    def run_shortly() -> None:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)

    os.kill(pid, signal.SIGSTOP)
    try:
        yield run_shortly
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stream_survives_a_reload(
    app: Callable[[], ConsolePage], gateway_of_app: GatewayProcess, triton: EmbeddedTriton
) -> None:
    """The stream lasts about a second: Triton is stopped so that it cannot end while the browser replaces the page."""
    page = app()

    def shown() -> str:
        return page.one("#tokens").text

    with stopped(triton) as run_shortly:
        page.click("#start")
        eventually(lambda: run_shortly() or " " in shown())
        before = shown()
        page.browser.refresh()
        page.wait_for("#tokens", before)
        assert active_streams(gateway_of_app) == 1
    page.wait_for("#state", "done")
    assert shown() == tokens(gateway_of_app)
    page.browser.refresh()
    page.wait_for("#state", "idle")


def test_stop_ends_the_stream(app: Callable[[], ConsolePage], gateway_of_app: GatewayProcess) -> None:
    page = app()
    for is_early in (True, False):
        page.click("#start")
        if not is_early:
            page.wait_for("#tokens", " ")
        page.click("#stop")
        page.wait_for("#state", "stopped")
        eventually(lambda: active_streams(gateway_of_app) == 0)
        page.browser.refresh()
        page.wait_for("#state", "idle")


def test_a_problem_is_the_error(app: Callable[[], ConsolePage]) -> None:
    page = app()
    page.click("#wrong")
    page.wait_for("#state", "failed")
    assert page.one("#error").text == "'max_tokens' must be an integer <= 512."
