"""The page /docs, the documentation site, and both the console and /docs with an API key, in a real Chromium."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from starlette.applications import Starlette

from app.api.openapi import pages_of_docs
from tests.browser.page import WAIT_S, ConsolePage
from tests.browser.test_speak import wait_for_the_sample
from tests.conftest import Require
from tests.docs.test_named_things import built_site
from tests.toolkit.keys import entry, key_text
from tests.toolkit.processes import GatewayProcess, live_gateway
from tests.toolkit.waiting import eventually

DEEP_LINK = "escaping deep link whitespace"
"""Swagger UI's own warning about the address of an operation."""
LIGHT, DARK = "rgb(246, 247, 247)", "rgb(15, 21, 20)"


@pytest.fixture
def docs(chromium: Chrome, gateway: GatewayProcess) -> Chrome:
    """The page with an executed request of `write`. It loads for seconds, so tests that do not leave it share it."""
    if not chromium.current_url.startswith(f"{gateway.url}/docs#"):
        chromium.get("about:blank")
        chromium.get_log("browser")
        chromium.get(f"{gateway.url}/docs#/write/run_write")
        execute(chromium, "write")
    return chromium


def execute(browser: Chrome, pipeline: str) -> None:
    """Sends the request of an open operation as it is filled in."""
    operation, wait = operation_of(pipeline), WebDriverWait(browser, WAIT_S)
    for button in (".try-out__btn", ".execute"):
        wait.until(lambda _, css=f"{operation} {button}": browser.find_elements(By.CSS_SELECTOR, css))[0].click()
    status = f"{operation} .live-responses-table .response-col_status"
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, status))


def operation_of(pipeline: str) -> str:
    return f"#operations-{pipeline}-run_{pipeline}"


def test_contrast_is_sufficient_and_no_control_is_nested(
    docs: Chrome, prefer: Callable[[str], None], axe: Callable[..., list[list[str]]]
) -> None:
    """Swagger UI's own markup breaks other rules of axe, which styles cannot change."""
    prefer("light")
    assert axe("color-contrast", "nested-interactive") == []
    prefer("dark")
    assert axe("color-contrast") == []


def test_the_page_follows_the_dark_scheme(docs: Chrome, prefer: Callable[[str], None]) -> None:
    check_schemes(docs, prefer, ".swagger-ui")


@pytest.mark.parametrize("pipeline", ["write", "ocr"])
def test_try_it_out_works_as_filled_in(docs: Chrome, pipeline: str) -> None:
    operation = operation_of(pipeline)
    if pipeline != "write":
        docs.find_element(By.CSS_SELECTOR, f"{operation} .opblock-summary-control").click()
        execute(docs, pipeline)
    live = f"{operation} .live-responses-table"
    assert docs.find_element(By.CSS_SELECTOR, f"{live} tbody .response-col_status").text.startswith("200")
    answer = json.loads(docs.find_element(By.CSS_SELECTOR, f"{live} .highlight-code code").text)
    assert answer.keys() >= {"write": {"text"}, "ocr": {"boxes", "early_exit"}}[pipeline]
    errors = [entry for entry in docs.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == [], "a file is missing, or the policy refused something"


def test_pipelines_come_first_and_there_is_a_way_back(docs: Chrome, gateway: GatewayProcess) -> None:
    names = [tag.text for tag in docs.find_elements(By.CSS_SELECTOR, ".opblock-tag a")]
    assert names[0] == "ocr"
    assert names[-1] == "health"
    docs.find_element(By.LINK_TEXT, "Console").click()
    assert docs.current_url.removeprefix(gateway.url).startswith("/")
    assert "/docs" not in docs.current_url


def test_the_error_pages_fit_a_phone(browser: Chrome, gateway: GatewayProcess, screen: Callable[[int], None]) -> None:
    screen(390)
    widths = "return ['html', 'main .wide'].map((each) => document.querySelector(each)?.scrollWidth ?? 0)"
    for path in ("/docs/errors", "/docs/errors/response_format_mismatch"):
        browser.get(f"{gateway.url}{path}")
        assert max(browser.execute_script(widths)) <= 390


def test_the_error_pages_follow_the_dark_scheme(
    browser: Chrome, prefer: Callable[[str], None], gateway: GatewayProcess
) -> None:
    for path in ("/docs/errors", "/docs/errors/invalid_input"):
        browser.get(f"{gateway.url}{path}")
        assert browser.find_elements(By.CSS_SELECTOR, "main h1")
        assert path != "/docs/errors" or browser.find_elements(By.LINK_TEXT, "invalid_input")
        check_schemes(browser, prefer, "body")


def check_schemes(browser: Chrome, prefer: Callable[[str], None], selector: str) -> None:
    """The page has the colours of both schemes, and nothing in its log: its policy refuses none of its parts."""
    script = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor === arguments[1]"
    for scheme, colour in (("light", LIGHT), ("dark", DARK)):
        prefer(scheme)
        WebDriverWait(browser, WAIT_S).until(lambda _, colour=colour: browser.execute_script(script, selector, colour))
    assert [line for line in browser.get_log("browser") if DEEP_LINK not in line["message"]] == []


PAGES = ["index", "contents", "reference/http", "reference/settings", "benchmarks/peers"]
LOADED = "return performance.getEntriesByType('resource').map(each => each.name)"


@pytest.fixture(scope="module")
def site(require: Require) -> Iterator[str]:
    """Serves the site as the gateway does, and yields its address."""
    app = Starlette(routes=pages_of_docs(built_site(require)))
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(server.run)
        eventually(lambda: server.started or done.done())
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/docs"
        server.should_exit = True


def test_the_search_finds_text_of_a_page(browser: Chrome, site: str) -> None:
    browser.get(f"{site}/")
    browser.find_element(By.CSS_SELECTOR, "button.md-search__button").click()
    field = "return document.activeElement?.shadowRoot?.activeElement ?? document.activeElement"
    WebDriverWait(browser, WAIT_S).until(lambda _: browser.execute_script(field).tag_name == "input")
    browser.execute_script(field).send_keys("slow_consumer")
    links = (
        "return [...document.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot?.querySelectorAll('*') ?? [])])"
    )
    links += ".filter(e => e.href?.includes?.('reference/errors.html')).map(e => e.href)"
    WebDriverWait(browser, WAIT_S).until(
        lambda _: any("?" in link or "slow" in link for link in browser.execute_script(links))
    )
    assert [name for name in browser.execute_script(LOADED) if not name.startswith(site)] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_phone_and_loads_no_external_files(
    page: str, browser: Chrome, site: str, screen: Callable[[int], None]
) -> None:
    screen(390)
    browser.get(f"{site}/{page}.html")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    loaded = browser.execute_script(LOADED)
    assert loaded
    assert [name for name in loaded if not name.startswith(site)] == []
    assert browser.get_log("browser") == []


Axe = Callable[[], list[list[str]]]


locked = live_gateway(keys=[entry("all"), entry("embeds", pipelines=["embed", "write"])])


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
    page.click("#forget")
    page.wait_for("main h1", "Enter your API key")
    assert (page.texts("main .problem"), page.texts("#forget")) == ([], [""])


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
    execute(page.browser, "embed")
    page.wait_for(".live-responses-table tbody .response-col_status", "200")
    assert page.texts("#operations-ocr-run_ocr") == []
    severe = [line["message"] for line in page.browser.get_log("browser") if line["level"] == "SEVERE"]
    assert all("openapi.json" in message for message in severe), "the Content-Security-Policy blocked a request"
