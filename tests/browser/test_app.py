"""Apps on another origin: with API keys, in both browsers; and the samples' React hook."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from selenium.webdriver import Chrome

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage, Tab
from tests.conftest import Require
from tests.docs.pages import ROOT
from tests.toolkit.environments import npm_environment
from tests.toolkit.http_server import served
from tests.toolkit.keys import entry, key_text, write_keys
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.waiting import eventually
from tests.typescript.test_client import active_streams, built_client

APP = Path(__file__).parent / "npm_app"
SLOW = {"interval_s": 0.05}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The origin of the app, and the folder of its files."""
    folder = tmp_path_factory.mktemp("app")
    for path in (APP / "index.html", APP / "app.js", ROOT / "samples" / "sign.png"):
        (folder / path.name).write_bytes(path.read_bytes())
    with served(folder) as origin:
        yield origin, folder


@pytest.fixture(scope="module")
def called(
    triton: EmbeddedTriton, config_path: Path, pages: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway with keys that allows calls of the app."""
    folder = tmp_path_factory.mktemp("called")
    keys = write_keys(folder / "keys.yaml", entry("app"))
    settings = {"triton_url": triton.grpc_url, "config": str(config_path), "api_keys_file": str(keys)}
    with running_gateway(folder / "gateway", cors_origins=pages[0], drain_s="1", **settings) as process:
        yield process


@pytest.fixture(scope="module")
def address(called: GatewayProcess, pages: tuple[str, Path]) -> str:
    return f"{pages[0]}/?{urlencode({'gateway': called.url, 'key': key_text('app')})}"


@pytest.fixture
def app(tab: Tab, address: str) -> Tab:
    """The tab with the app, which one test after the other uses."""
    if tab.call("() => location.href") != address:
        tab.open(address)
    return tab


@pytest.fixture(scope="module")
def bundle(pages: tuple[str, Path], require: Require) -> None:
    """Adds the chat with its libraries to the files of the app."""
    folder = npm_environment("app-in-a-page", APP, require)
    options = ["--bundle", "--format=esm", "--minify", "--log-level=error", f"--outfile={pages[1] / 'chat.js'}"]
    subprocess.run([folder / "node_modules" / ".bin" / "esbuild", "chat.js", *options], cwd=folder, check=True)


def script(**keys: Any) -> str:
    return json.dumps(SLOW | keys)


def test_an_upload_is_answered(app: Tab) -> None:
    assert app.call("() => upload()")["texts"][0] == "Hello Triton gateway"
    assert app.call("protocolOf", "/v1/pipelines/ocr") == "http/1.1", "the page reads no times of other origins"


def test_errors_are_readable(app: Tab) -> None:
    for mib in (9, 20, 60):
        error = app.call("(size) => errorOf(upload(size))", str(mib << 20))
        assert (mib, error["status"], error["code"]) == (mib, 413, "payload_too_large")
    wrong = app.call("() => errorOf(post('/v1/pipelines/write', {prompt: 'x', max_tokens: 9999}))")
    assert (wrong["status"], wrong["code"]) == (422, "invalid_input")
    unknown = app.call("() => errorOf(call('/v1/pipelines/nothing'))")
    assert (unknown["status"], unknown["code"]) == (404, "unknown_pipeline")


def test_headers_of_libraries_are_allowed(app: Tab) -> None:
    """The browser itself refuses another header."""
    names = ["User-Agent", "baggage", "sentry-trace", "tracestate", "Idempotency-Key"]
    assert {name: app.call("withHeader", name) for name in names} == dict.fromkeys(names, 200)
    assert app.call("() => errorOf(withHeader('X-Tenant'))")["name"] == "TypeError"


class TestLibraries:
    """The AI SDK of Vercel and OpenAI's client in the page."""

    @pytest.fixture
    def chat(self, tab: Tab, address: str, bundle: None) -> Tab:
        """The tab with the app again, because a chat keeps its messages."""
        self.reopen(tab, address)
        return tab

    def reopen(self, tab: Tab, address: str) -> None:
        tab.open(address)
        tab.call("async () => { await import('./chat.js'); }")

    def test_use_chat_streams_and_stops_an_answer_and_shows_an_error(
        self, chat: Tab, address: str, tmp_path: Path
    ) -> None:
        said = chat.call("say", script(outputs=3, texts=["61", "62", "63"]))
        assert said == {"status": "ready", "said": "abc"}
        self.reopen(chat, address)
        notice = tmp_path / "notice"
        said = chat.call("say", script(outputs=60, texts=["61"], notice=str(notice)), "5")
        assert said["status"] == "ready"
        assert 5 <= len(said["said"]) < 60
        eventually(lambda: notice.exists() and bool(notice.read_text()))
        self.reopen(chat, address)
        said = chat.call("say", script(outputs=0, then="error", error={"code": "INTERNAL", "message": "no"}))
        assert said["status"] == "error"
        assert said["error"]

    def test_openais_client_streams_an_answer_and_does_not_repeat_what_cannot_succeed(self, chat: Tab) -> None:
        assert chat.call("complete", script(outputs=3, texts=["61", "62", "63"])) == {"text": "abc"}
        failed = chat.call("complete", script(outputs=0, then="error", error={"code": "INTERNAL", "message": "no"}))
        assert failed == {"status": 502, "code": "model_error", "requests": 1}


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
def hook_page(browser: Chrome, origin: str, gateway_of_app: GatewayProcess) -> Callable[[], ConsolePage]:
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
    hook_page: Callable[[], ConsolePage], gateway_of_app: GatewayProcess, triton: EmbeddedTriton
) -> None:
    """The stream lasts about a second: Triton is stopped so that it cannot end while the browser replaces the page."""
    page = hook_page()

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


def test_stop_ends_the_stream(hook_page: Callable[[], ConsolePage], gateway_of_app: GatewayProcess) -> None:
    page = hook_page()
    for is_early in (True, False):
        page.click("#start")
        if not is_early:
            page.wait_for("#tokens", " ")
        page.click("#stop")
        page.wait_for("#state", "stopped")
        eventually(lambda: active_streams(gateway_of_app) == 0)
        page.browser.refresh()
        page.wait_for("#state", "idle")


def test_a_problem_is_the_error(hook_page: Callable[[], ConsolePage]) -> None:
    page = hook_page()
    page.click("#wrong")
    page.wait_for("#state", "failed")
    assert page.one("#error").text == "'max_tokens' must be an integer <= 512."
