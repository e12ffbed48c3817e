"""The page /docs in a real Chromium, under its own Content-Security-Policy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser.page import WAIT_S
from tests.processes import GatewayProcess


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


def background(browser: Chrome, selector: str) -> str:
    script = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    return str(browser.execute_script(script, selector))


def test_pipelines_come_first_and_there_is_a_way_back(browser: Chrome, gateway: GatewayProcess) -> None:
    browser.get(f"{gateway.url}/docs")
    tags = WebDriverWait(browser, WAIT_S).until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".opblock-tag a"))
    names = [tag.text for tag in tags]
    assert names[0] == "ocr"
    assert names[-1] == "health"
    browser.find_element(By.LINK_TEXT, "Console").click()
    assert browser.current_url.removeprefix(gateway.url).startswith("/")
    assert "/docs" not in browser.current_url


@pytest.mark.parametrize("path", ["/docs", "/docs/errors", "/docs/errors/invalid_input"])
def test_pages_follow_the_dark_scheme(
    browser: Chrome, prefer: Callable[[str], None], gateway: GatewayProcess, path: str, artifacts: Path
) -> None:
    browser.get(f"{gateway.url}{path}")
    shown = ".swagger-ui .info" if path == "/docs" else "main h1"
    WebDriverWait(browser, WAIT_S).until(lambda _: browser.find_elements(By.CSS_SELECTOR, shown))
    page = ".swagger-ui" if path == "/docs" else "body"
    for scheme, colour in (("light", "rgb(246, 247, 247)"), ("dark", "rgb(15, 21, 20)")):
        prefer(scheme)
        WebDriverWait(browser, WAIT_S).until(lambda _, colour=colour: background(browser, page) == colour)
        browser.save_screenshot(str(artifacts / f"{path.strip('/').replace('/', '-')}-{scheme}.png"))
    assert browser.get_log("browser") == []


def test_the_policy_allows_the_error_pages(browser: Chrome, gateway: GatewayProcess) -> None:
    browser.get(f"{gateway.url}/docs/errors")
    assert browser.find_elements(By.LINK_TEXT, "invalid_input")
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_sufficient_and_no_control_is_nested(
    browser: Chrome,
    prefer: Callable[[str], None],
    axe: Callable[..., list[list[str]]],
    gateway: GatewayProcess,
    scheme: str,
) -> None:
    """Swagger UI's own markup breaks other rules of axe, which styles cannot change."""
    prefer(scheme)
    browser.get(f"{gateway.url}/docs#/write/run_write")
    wait = WebDriverWait(browser, WAIT_S)
    for button in (".try-out__btn", ".execute"):
        wait.until(lambda _, css=button: browser.find_elements(By.CSS_SELECTOR, css))[0].click()
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".live-responses-table .response-col_status"))
    assert axe("color-contrast", "nested-interactive") == []
