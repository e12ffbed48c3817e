"""The page /docs in a real Chromium, under its own Content-Security-Policy."""

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.processes import GatewayProcess

WAIT_S = 20.0


def test_the_policy_refuses_nothing_of_the_page(browser: Chrome, gateway: GatewayProcess) -> None:
    browser.get(f"{gateway.url}/docs")
    wait = WebDriverWait(browser, WAIT_S)
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#operations-write-run_write"))
    browser.get(f"{gateway.url}/docs/errors")
    assert browser.find_elements(By.LINK_TEXT, "invalid_input")
    assert browser.get_log("browser") == []
