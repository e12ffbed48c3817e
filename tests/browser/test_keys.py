"""The console and /docs with an API key that the user enters, in a real Chromium."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import WAIT_S, ConsolePage
from tests.browser.test_speak import wait_for_the_sample
from tests.toolkit.keys import entry, key_text, write_keys
from tests.toolkit.processes import GatewayProcess, running_gateway

Axe = Callable[[], list[list[str]]]


@pytest.fixture(scope="module")
def locked(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway that requires keys."""
    folder = tmp_path_factory.mktemp("locked")
    keys = write_keys(folder / "keys.yaml", entry("all"), entry("embeds", pipelines=["embed", "write"]))
    with running_gateway(
        folder / "gateway", triton_url=triton.grpc_url, config=str(config_path), api_keys_file=str(keys)
    ) as process:
        yield process


@pytest.fixture
def page(browser: Chrome, locked: GatewayProcess) -> Iterator[ConsolePage]:
    page = ConsolePage(browser)
    yield page
    browser.get(f"{locked.url}/docs/errors")
    browser.execute_script("sessionStorage.clear()")


def type_key(page: ConsolePage, text: str) -> None:
    page.wait_for("#key:not([hidden])")
    page.enter(page.one("#key input"), text)
    page.click("#key button")


def test_the_console_works_with_an_entered_key(page: ConsolePage, locked: GatewayProcess, axe: Axe) -> None:
    page.browser.get(locked.url)
    page.wait_for("main h1", "Enter your API key")
    assert page.texts("h1") == ["Enter your API key"]
    page.wait_for("#key:not([hidden])")
    assert axe() == []
    assert page.texts("main .problem") == page.texts("#pipelines a") == []
    type_key(page, key_text("embeds"))
    page.wait_for("#pipelines a")
    assert {text.split("\n")[0].split()[0] for text in page.texts("#pipelines a .title")} == {"embed", "write"}
    page.browser.get(f"{locked.url}/#write")
    page.wait_for("main h1", "write")
    page.click("#run")
    page.wait_for(".took")
    page.click("#stream")
    page.wait_for_state("done")
    assert "Authorization: Bearer $API_KEY" in page.one("main").get_property("textContent")


def test_the_key_is_kept_in_this_tab_only(page: ConsolePage, locked: GatewayProcess) -> None:
    """It asks again after an invalid key, and when the user removes the key."""
    page.browser.get(locked.url)
    type_key(page, "tgw_wrong")
    page.wait_for("main .problem", "The API key is not valid.")
    assert page.texts("h1") == ["Enter your API key"]
    type_key(page, key_text("all"))
    page.wait_for("#pipelines a")
    page.browser.refresh()
    page.wait_for("#pipelines a")
    assert page.browser.execute_script("return [localStorage.length, document.cookie]") == [0, ""]
    assert key_text("all") not in page.browser.current_url
    assert key_text("all") not in page.browser.page_source
    first = page.browser.current_window_handle
    page.browser.switch_to.new_window("tab")
    page.browser.get(locked.url)
    page.wait_for("main h1", "Enter your API key")
    page.browser.close()
    page.browser.switch_to.window(first)
    page.click("#key button[type=button]")
    page.wait_for("main h1", "Enter your API key")
    assert page.texts("main .problem") == []


def test_a_key_opens_a_session_over_a_websocket(page: ConsolePage, locked: GatewayProcess) -> None:
    page.browser.get(f"{locked.url}/#listen")
    type_key(page, key_text("all"))
    page.wait_for(".speak")
    page.click("#use-sample")
    wait_for_the_sample(page)


def test_docs_work_with_an_entered_key(page: ConsolePage, locked: GatewayProcess, axe: Axe) -> None:
    page.browser.get(f"{locked.url}/docs#/embed/run_embed")
    page.wait_for("h1", "Enter your API key")
    page.wait_for("#key:not([hidden])")
    assert axe() == []
    type_key(page, key_text("embeds"))
    wait = WebDriverWait(page.browser, WAIT_S)
    for button in (".try-out__btn", ".execute"):
        wait.until(lambda _, css=button: page.browser.find_elements(By.CSS_SELECTOR, css))[0].click()
    page.wait_for(".live-responses-table tbody .response-col_status", "200")
    assert page.texts("#operations-ocr-run_ocr") == []
    severe = [line["message"] for line in page.browser.get_log("browser") if line["level"] == "SEVERE"]
    assert all("openapi.json" in message for message in severe), "the Content-Security-Policy blocked a request"
