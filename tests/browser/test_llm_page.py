"""The page of the tutorial "An LLM in a browser", opened as a file, with the real `write` pipeline."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from selenium.webdriver import Chrome

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.toolkit.events import checked, parsed
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.proxy import DroppingNetwork, network_to
from tests.toolkit.waiting import eventually

FILE = Path(__file__).parents[2] / "docs" / "tutorials" / "llm_in_a_browser" / "write.html"
SEED = 7
"""With other seeds the model may end the text after a few tokens."""
STOP_AT_THE_FIRST_TOKEN = """
const [text, stop] = ["text", "stop"].map((id) => document.getElementById(id));
new MutationObserver(() => text.textContent && stop.click()).observe(text, {childList: true});
"""


@pytest.fixture(scope="module")
def open_gateway(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway that allows calls from pages opened as files, and writes a text of 512 tokens."""
    config = yaml.safe_load(config_path.read_text())
    config["pipelines"]["write"]["parameters"]["seed"] = {"type": "integer", "default": SEED}
    with open_to_files(triton, config, tmp_path_factory.mktemp("open")) as process:
        yield process


@pytest.fixture
def slow_gateway(triton: EmbeddedTriton, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway whose `write` is slow enough that a busy browser can stop it: the prompt is a script."""
    text = {"text": {"tensor": "TEXT", "kind": "text"}}
    prompt = {"prompt": {"tensor": "SCRIPT", "kind": "text"}}
    parameters = {"max_tokens": {"type": "integer", "optional": True}}
    write = {"model": "scripted_stream", "inputs": prompt, "parameters": parameters, "outputs": text, "stream": True}
    with open_to_files(triton, {"pipelines": {"write": write}}, tmp_path) as process:
        yield process


@contextmanager
def open_to_files(triton: EmbeddedTriton, config: dict[str, Any], folder: Path) -> Iterator[GatewayProcess]:
    (folder / "gateway.yaml").write_text(yaml.safe_dump(config))
    (folder / "samples").symlink_to(FILE.parents[3] / "samples")
    settings = {"triton_url": triton.grpc_url, "config": str(folder / "gateway.yaml"), "cors_origins": "null"}
    with running_gateway(folder / "gateway", **settings, drain_s="1") as process:
        yield process


@pytest.fixture
def opened(browser: Chrome, open_gateway: GatewayProcess) -> ConsolePage:
    page = ConsolePage(browser)
    browser.get(f"{FILE.as_uri()}?gateway={open_gateway.url}")
    return page


def text_of(page: ConsolePage) -> str:
    return str(page.one("#text").get_property("textContent"))


def stored_text(page: ConsolePage, gateway: GatewayProcess) -> str:
    """Returns the complete text of the page's stream, read from the gateway."""
    path = urlsplit(page.browser.execute_script("return history.state.stream")).path
    events = checked(parsed(httpx.get(gateway.url + path, timeout=30).text))
    return "".join(event.data["text"] for event in events[:-1])


def test_a_reload_shows_the_stream_again(opened: ConsolePage, open_gateway: GatewayProcess) -> None:
    opened.click("#write")
    opened.wait_for("#state", "Done.")
    text = text_of(opened)
    assert len(text) > 100
    assert text == stored_text(opened, open_gateway)
    opened.browser.refresh()
    opened.wait_for("#state", "Done.")
    assert text_of(opened) == text


def test_the_page_resumes_after_a_lost_connection(
    browser: Chrome, open_gateway: GatewayProcess, opened: ConsolePage
) -> None:
    port = urlsplit(open_gateway.url).port
    assert port
    with network_to(port, DroppingNetwork) as network:
        browser.get(f"{FILE.as_uri()}?gateway={network.url}")
        opened.click("#write")
        opened.wait_for("#state", "The connection was lost.")
        opened.wait_for("#state", "Done.")
        assert network.dropped == 1
        assert text_of(opened) == stored_text(opened, open_gateway)


def test_stop_cancels_the_stream(browser: Chrome, slow_gateway: GatewayProcess) -> None:
    page = ConsolePage(browser)
    browser.get(f"{FILE.as_uri()}?gateway={slow_gateway.url}")
    script = json.dumps({"outputs": 1000, "interval_s": 0.05, "texts": ["61"]})
    browser.execute_script("document.getElementById('prompt').value = arguments[0]", script)
    browser.execute_script(STOP_AT_THE_FIRST_TOKEN)
    page.click("#write")
    page.wait_for("#state", "Stopped.")
    text = text_of(page)
    browser.refresh()
    page.wait_for("#state", "Ready.")
    assert text
    eventually(lambda: slow_gateway.metric("requests_total", pipeline="write", outcome="cancelled") == 1)
