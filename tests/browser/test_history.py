"""Streams in the console's history: their joined answer, their difference to another answer, and a second run."""

import json
from collections.abc import Callable

from selenium.webdriver.common.by import By

from tests.browser.page import ConsolePage

Console = Callable[..., ConsolePage]


def press(page: ConsolePage, label: str) -> None:
    """Presses a button of the history, of the newest run that has it."""
    page.browser.find_element(By.XPATH, f"//*[@class='history']//button[.='{label}']").click()


def test_a_stream_has_the_answer_of_a_request_without_a_stream(console: Console) -> None:
    page = console("write")
    page.click("#stream")
    page.wait_for_state("done")
    written = page.written
    page.click(".history summary")
    assert [text.split(" · ", 1)[1] for text in page.texts(".history li .small")] == ["stream · done · 24 outputs"]
    assert len(page.browser.find_elements(By.CSS_SELECTOR, ".history li[aria-current]")) == 1
    page.click("#run")
    page.wait_for("[data-output=text]")
    press(page, "Compare")
    page.wait_for(".history [role=status]", "No difference between")
    page.click(".history li:nth-child(2) button")
    page.wait_for(".took", "stream · done · 24 outputs")
    assert page.one("[data-output=text] .text").get_property("textContent") == written
    assert page.texts("[data-output=finish_reason] .text") == ["length"]
    page.click(".history li:nth-child(2) button:nth-child(2)")
    page.wait_for(".history li:nth-child(3)", "24 outputs")


EXIT = {"code": "ALREADY_EXISTS", "message": "EARLY_EXIT[nothing]"}


def test_streams_that_failed_or_ended_early_are_shown_again(console: Console) -> None:
    page = console("scripted_stream")
    for state, shown, then in (
        ("failed", ".notice.problem", {"then": "error"}),
        ("exit", ".notice.exit", {"then": "error", "error": EXIT}),
    ):
        page.fill("script", json.dumps({"outputs": 1, **then}))
        page.click("#stream")
        page.wait_for_state(state)
        if state == "failed":
            page.click(".history summary")
        press(page, "Show")
        page.wait_for(".took", f"stream · {state} · 1 outputs")
        assert len(page.browser.find_elements(By.CSS_SELECTOR, f".answer {shown}")) == 1


def test_a_cancelled_stream_keeps_its_outputs(console: Console) -> None:
    page = console("scripted_patient")
    page.fill("script", json.dumps({"outputs": 1000, "interval_s": 0.02, "texts": ["61"]}))
    page.click("#stream")
    page.wait_for_outputs(5)
    page.click("#cancel")
    page.wait_for_state("cancelled")
    written = page.written
    page.click(".history summary")
    press(page, "Show")
    page.wait_for(".took", "stream · cancelled")
    assert page.texts("[data-output=text] .text") == [written]


def test_a_request_with_an_image_has_a_thumbnail(console: Console) -> None:
    page = console("ocr")
    page.wait_for(".drop", "samples/sign.png")
    page.click("#run")
    page.wait_for(".took")
    page.click(".history summary")
    assert page.texts(".history .summary") == ["image: samples/sign.png"]
    shown = page.one(".history img").get_attribute("src")
    assert shown == page.one(".drop img").get_attribute("src")
