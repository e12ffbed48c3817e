"""Texts of operators, models and users stay texts in the console: no script runs, and no element appears."""

import json
from pathlib import Path

import yaml
from selenium.webdriver import Chrome

from tests.browser.page import ConsolePage
from tests.toolkit.processes import StartGateway

MARKUP = (
    "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    "<svg onload='window.ran = 1'></svg><a href='javascript:window.ran = 1'>a</a>"
    "[a](javascript:window.ran=1) ![a](x) \u202etxt.exe"
)
PIPELINE = "markup"
SCRIPTS = "[onerror], [onload], a[href^='javascript:'], script:not([src])"
ELEMENTS = f"{SCRIPTS}, img[src=x]"


def test_markup_in_texts_runs_no_script(browser: Chrome, start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway(config=str(config_in(tmp_path)), expose_model_errors="true")
    page = ConsolePage(browser)
    page.open(gateway.url, PIPELINE)
    page.wait_for("main", MARKUP)
    check_no_script_ran(browser)

    page.fill("script", json.dumps({"text": MARKUP}))
    page.click("#run")
    page.wait_for(".output", MARKUP)
    check_no_script_ran(browser)

    page.fill("script", json.dumps({"raise": MARKUP}))
    page.click("#run")
    page.wait_for(".problem", "<script>")
    check_no_script_ran(browser)

    name = tmp_path / "<img src=x onerror=ran=1>\u202egnp.json"
    name.write_text("{}")
    page.open(gateway.url, "upload")
    page.one("input[type=file]").send_keys(str(name))
    page.click("#run")
    page.wait_for(".output")
    check_no_script_ran(browser)

    browser.get(f"{gateway.url}/docs")  # Swagger UI shows descriptions as Markdown, which has images and links
    page.wait_for("body", PIPELINE)
    check_no_script_ran(browser, SCRIPTS)


def config_in(folder: Path) -> Path:
    pipeline = {
        "model": "scripted",
        "description": MARKUP,
        "inputs": {"script": {"tensor": "SCRIPT", "kind": "text"}},
        "outputs": {"text": {"tensor": "TEXT", "kind": "text"}, "numbers": {"tensor": "NUMBERS"}},
        "sample": {"script": json.dumps({"text": MARKUP})},
    }
    config = folder / "gateway.yaml"
    upload = pipeline | {"inputs": {"script": {"tensor": "SCRIPT", "kind": "binary"}}}
    del upload["sample"]
    config.write_text(yaml.safe_dump({"pipelines": {PIPELINE: pipeline, "upload": upload}}))
    return config


def check_no_script_ran(browser: Chrome, elements: str = ELEMENTS) -> None:
    assert browser.execute_script("return window.ran") is None
    assert browser.find_elements("css selector", elements) == []
