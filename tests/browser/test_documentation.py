"""The documentation site in a real browser."""

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser.page import WAIT_S
from tests.browser.pages import served
from tests.conftest import Require
from tests.docs.test_site import built_site

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
