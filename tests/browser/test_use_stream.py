"""The React hook ``samples/useStream.ts`` in a page of another origin, with StrictMode."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome

from app.triton.embedded.server import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.conftest import Require
from tests.environments import ROOT
from tests.processes import GatewayProcess, running_gateway
from tests.typescript.building import built_client
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def origin(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a server with the page."""
    folder = tmp_path_factory.mktemp("app")
    shutil.copy(built_client(require) / "page.js", folder)
    (folder / "index.html").write_text(
        '<!doctype html><title>app</title><div id="root"></div><script src="page.js"></script>'
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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
def stopped(triton: EmbeddedTriton) -> Iterator[None]:
    assert triton.pid
    os.kill(triton.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(triton.pid, signal.SIGCONT)


def reloaded_within_the_stream(page: ConsolePage, triton: EmbeddedTriton, gateway: GatewayProcess) -> bool:
    """False if the stream, which lasts about a second, ended before Triton was stopped: then nothing is kept.

    With Triton stopped, the stream cannot end while the browser replaces the page.
    """
    page.click("#start")
    page.wait_for("#tokens", " ")
    with stopped(triton):
        was_running = active_streams(gateway) == 1
        page.browser.execute_script("onpagehide = () => { name = sessionStorage.getItem('stream:write') ?? '' }")
        page.browser.refresh()
        return was_running and bool(page.browser.execute_script("return name"))


def test_a_stream_survives_a_reload(
    app: Callable[[], ConsolePage], gateway_of_app: GatewayProcess, triton: EmbeddedTriton
) -> None:
    page = app()
    assert any(reloaded_within_the_stream(page, triton, gateway_of_app) for _ in range(20))
    page.wait_for("#state", "done")
    assert page.one("#tokens").text == tokens(gateway_of_app)
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
