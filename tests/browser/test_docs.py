"""The page /docs, under its own Content-Security-Policy, and the documentation site, in a real Chromium."""

import json
from collections.abc import Callable, Iterator

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser.page import WAIT_S
from tests.conftest import Require
from tests.docs.test_site import built_site
from tests.toolkit.http_server import served
from tests.toolkit.processes import GatewayProcess

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
    for scheme, colour in (("light", LIGHT), ("dark", DARK)):
        prefer(scheme)
        WebDriverWait(browser, WAIT_S).until(lambda _, colour=colour: background(browser, selector) == colour)
    assert [line for line in browser.get_log("browser") if DEEP_LINK not in line["message"]] == []


def background(browser: Chrome, selector: str) -> str:
    script = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    return str(browser.execute_script(script, selector))


PAGES = ["index", "docs/index", "docs/reference/http", "docs/reference/settings", "docs/benchmarks/peers"]
LOADED = "return performance.getEntriesByType('resource').map(each => each.name)"
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}


@pytest.fixture(scope="module")
def site(require: Require) -> Iterator[str]:
    """Serves the site and yields its address."""
    with served(built_site(require)) as origin:
        yield origin


def test_the_search_finds_text_of_a_page(browser: Chrome, site: str) -> None:
    browser.get(f"{site}/docs/index.html")
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
def test_a_page_fits_a_phone_and_loads_no_external_files(page: str, browser: Chrome, site: str) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        browser.get(f"{site}/{page}.html")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE["width"]
        loaded = browser.execute_script(LOADED)
        assert loaded
        assert [name for name in loaded if not name.startswith(site)] == []
        assert browser.get_log("browser") == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
