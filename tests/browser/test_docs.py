"""The page /docs in a real Chromium, under its own Content-Security-Policy."""

import json

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.processes import GatewayProcess

WAIT_S = 20.0


@pytest.mark.parametrize("pipeline", ["write", "ocr"])
def test_try_it_out_works_as_filled_in(browser: Chrome, gateway: GatewayProcess, pipeline: str) -> None:
    wait = WebDriverWait(browser, WAIT_S)
    browser.get(f"{gateway.url}/docs#/{pipeline}/run_{pipeline}")
    for button in (".try-out__btn", ".execute"):
        wait.until(lambda _, css=button: browser.find_elements(By.CSS_SELECTOR, css))[0].click()
    live = ".live-responses-table"
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, f"{live} .response-col_status"))
    assert browser.find_element(By.CSS_SELECTOR, f"{live} tbody .response-col_status").text.startswith("200")
    answer = json.loads(browser.find_element(By.CSS_SELECTOR, f"{live} .highlight-code code").text)
    assert answer.keys() >= {"write": {"text"}, "ocr": {"boxes", "early_exit"}}[pipeline]
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == [], "a file is missing, or the policy refused something"


def test_the_policy_allows_the_error_pages(browser: Chrome, gateway: GatewayProcess) -> None:
    browser.get(f"{gateway.url}/docs/errors")
    assert browser.find_elements(By.LINK_TEXT, "invalid_input")
    assert browser.get_log("browser") == []
