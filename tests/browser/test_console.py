"""The console in a real Chromium, against the real gateway and Triton."""

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.proxy import network_to
from tests.toolkit.waiting import eventually

Console = Callable[..., ConsolePage]
LINES = ["Hello Triton gateway", "Open daily 9 to 18", "Please ring the bell"]
HANG = """
const [path] = arguments;
const send = window.fetch;
const released = new Promise((resolve) => { window.release = resolve; });
window.fetch = async (asked, options) => {
  if (asked === path) await released;
  return send(asked, options);
};
"""
"""Requests to a path wait until the test calls `release()`."""
SMALL_TARGETS = """
const kinds = "a:not(.skip), button, input:not([type=checkbox]), select, textarea, summary, .node[role=button]";
const isSmall = ({ width, height }) => Math.min(width, height) < 44;
return [...document.querySelectorAll(kinds)]
  .filter((target) => target.checkVisibility() && isSmall(target.getBoundingClientRect()))
  .map((target) => target.outerHTML);
"""
NARROWED = """
const [done] = arguments;
const query = Object.assign(new EventTarget(), { matches: false });
window.matchMedia = () => query;
Promise.all([import("/console/lib.js"), import("/console/narrow.js")]).then(([{ html, render }, { useNarrow }]) => {
  const place = document.createElement("p");
  const Width = () => html`${useNarrow() ? "narrow" : "wide"}`;
  render(html`<${Width} />`, place);
  const first = place.textContent;
  query.matches = true;
  setTimeout(() => done([first, place.textContent]), 500);
});
"""
"""The screen becomes narrow between the first render and its effect, so the component hears of no change."""
SAMPLES = Path(__file__).parents[2] / "samples"


def drop(page: ConsolePage, name: str) -> None:
    page.one("input[type=file]").send_keys(str(SAMPLES / name))


def drawn_height_by_width(page: ConsolePage) -> float:
    """Returns the proportions of the drawing with the boxes, which are those of the image's pixels."""
    _, _, width, height = page.one(".boxes svg").get_dom_attribute("viewBox").split()
    return float(height) / float(width)


def test_ocr_draws_its_boxes_and_texts_on_the_image(console: Console) -> None:
    page = console("ocr")
    drop(page, "sign.png")
    page.wait_for(".took")
    assert page.texts(".boxes .box text") == LINES
    assert page.texts(".bars li span") == LINES
    box, image = page.one(".boxes .box polygon").rect, page.one(".boxes img").rect
    assert image["x"] < box["x"]
    assert image["y"] < box["y"] < image["y"] + image["height"] / 3
    assert image["height"] / image["width"] == pytest.approx(drawn_height_by_width(page), rel=0.01)


def test_write_streams_with_its_figures_and_a_histogram(console: Console, client: httpx.Client) -> None:
    page = console("write")
    assert page.one("[name=prompt]").get_property("value") == "The for statement"
    page.fill("max_tokens", "128")
    page.click("#stream")
    page.wait_for_outputs(20)
    page.wait_for_state("done")
    body = {"prompt": "The for statement", "max_tokens": 128, "seed": 7}
    assert page.written == client.post("/v1/pipelines/write", json=body).json()["text"]
    assert page.figure("tokens") == "128"
    assert float(page.figure("tokens-s")) > 0
    assert page.figure("first-output").endswith(" ms")
    page.wait_for(".token-times h3", "median")
    assert len(page.browser.find_elements(By.CSS_SELECTOR, ".token-times rect")) > 1


def test_the_keyboard_is_enough(console: Console) -> None:
    page = console("write")
    page.one("[name=chunk_tokens]").send_keys(Keys.TAB)
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait_for_state("done")
    assert page.figure("tokens") == "24"


def with_a_long_stream(console: Console) -> ConsolePage:
    """Opens a pipeline and fills in the script of a stream of 20 s."""
    page = console("scripted_patient")
    page.fill("script", json.dumps({"outputs": 1000, "interval_s": 0.02}))
    return page


def cancelled(gateway: GatewayProcess) -> float:
    return gateway.metric("requests_total", pipeline="scripted_patient", transport="stream", outcome="cancelled")


def test_cancel_stops_the_model(console: Console, gateway: GatewayProcess) -> None:
    before, page = cancelled(gateway), with_a_long_stream(console)
    page.click("#stream")
    page.wait_for_outputs(5)
    page.click("#cancel")
    page.wait_for_state("cancelled")
    page.wait_for("#stream:enabled")
    assert cancelled(gateway) == before + 1


def test_another_address_ends_the_stream_at_once(console: Console, gateway: GatewayProcess) -> None:
    """Even if the description of the next pipeline never arrives."""
    before, page = cancelled(gateway), with_a_long_stream(console)
    page.click("#stream")
    page.wait_for_outputs(2)
    page.browser.execute_script(HANG, "/v1/pipelines/write")
    page.browser.execute_script("location.hash = '#write'")
    page.wait_for_state("cancelled")
    assert cancelled(gateway) == before + 1


def test_a_stream_that_starts_after_the_page_left_is_cancelled(console: Console, gateway: GatewayProcess) -> None:
    before, page = cancelled(gateway), with_a_long_stream(console)
    page.browser.execute_script(HANG, "/v1/streams")
    page.click("#stream")
    page.browser.execute_script("location.hash = '#write'")
    page.wait_for("main h1", "write")
    page.browser.execute_script("release()")
    eventually(lambda: cancelled(gateway) == before + 1)


def test_run_is_first_for_a_model_with_one_response(console: Console) -> None:
    page = console("scripted")
    assert page.texts("main form .actions:first-of-type button") == ["Run", "Stream"]
    assert "streams" not in page.texts(".heading .chip")
    page = console("write")
    assert page.texts("main form .actions:first-of-type button") == ["Stream", "Run at once"]
    assert "streams" in page.texts(".heading .chip")
    streaming = {text.split()[0] for text in page.texts("#pipelines .title") if "streams" in text}
    assert streaming == {"write", "scripted_patient", "scripted_kept", "scripted_stream"}


def test_the_list_of_pipelines_has_a_filter(console: Console) -> None:
    page = console("write")
    page.one(".filter input").send_keys("ABOUT insights_t")
    page.wait_for(".filter small", "1 of 16")
    assert page.texts("#pipelines .title") == ["insights_topic"]
    page.one(".filter input").send_keys(Keys.ENTER)
    page.wait_for("main h1", "insights_topic")


def streamed(page: ConsolePage, outputs: int) -> str:
    """Starts a stream whose text tells every output from every other, and returns that text."""
    texts = [f"<{index}>" for index in range(outputs)]
    script = {"outputs": outputs, "interval_s": 0.03, "texts": [text.encode().hex() for text in texts]}
    page.fill("script", json.dumps(script))
    page.click("#stream")
    return "".join(texts)


def test_a_lost_network_causes_no_gap_and_no_duplicate(console: Console, gateway: GatewayProcess) -> None:
    started = gateway.metric("requests_total", pipeline="scripted_patient", transport="stream")
    with network_to(urlsplit(gateway.url).port or 0) as network:
        page = console("scripted_patient", at=network.url)
        expected = streamed(page, 300)
        for outputs in (10, 60):
            page.wait_for_outputs(outputs)
            network.cut()
            page.wait_for_state("lost")
            network.restore()
            page.wait_for_state("live")
        page.wait_for_state("done")
        assert page.written == expected
    assert gateway.metric("requests_total", pipeline="scripted_patient", transport="stream") == started + 1


def test_a_lost_connection_resumes_where_it_stopped(console: Console) -> None:
    page = console("scripted_kept")  # the gateway keeps its streams for longer than the two seconds of the disconnect
    expected = streamed(page, 300)  # 9 s: a slow browser still finds the buttons, which go with the end of the stream
    page.wait_for_outputs(10)
    page.click(".try summary")
    page.click("#drop")
    page.wait_for_state("lost")
    page.wait_for_state("done")
    assert page.written == expected


@pytest.mark.parametrize(
    ("pipeline", "field", "value", "code"),
    [
        ("write", "seed", "99999999999999999999", "invalid_input"),
        ("scripted_stream", "script", '{"outputs": 0, "then": "error"}', "model_error"),
    ],
)
def test_an_error_leads_to_its_page(console: Console, pipeline: str, field: str, value: str, code: str) -> None:
    page = console(pipeline)
    page.fill(field, value)
    page.click("#stream")
    page.wait_for(".problem a", code)
    page.click(".problem a")
    page.wait_for("h1", code)


def test_the_graph_shows_every_step(console: Console) -> None:
    page = console("insights")
    page.wait_for(".node")
    steps = ["request", "insights_gate", "text_embed", "feature_router", "head_topic", "head_sentiment", "response"]
    assert page.texts(".node text:first-of-type") == steps
    assert page.browser.get_log("browser") == [], "a file is missing, or the policy refused something"


@pytest.mark.parametrize("pipeline", ["ocr", "write", "insights"])
def test_a_phone_shows_the_form_first_with_large_targets(console: Console, pipeline: str) -> None:
    page = console(pipeline)
    page.wait_for(".graph .node")
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        page.wait_for(".panels + .graph .node")
        width = page.browser.execute_script("return document.documentElement.scrollWidth")
        small = page.browser.execute_script(SMALL_TARGETS)
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= 390
    assert small == []


def test_a_change_of_width_before_the_first_effect_is_seen(browser: Chrome, gateway: GatewayProcess) -> None:
    browser.get(f"{gateway.url}/docs/errors")
    assert browser.execute_async_script(NARROWED) == ["wide", "narrow"]


def test_it_is_dark_where_the_user_wants_dark(console: Console, prefer: Callable[[str], None]) -> None:
    page = console("insights")
    prefer("dark")
    page.click("#run")
    page.wait_for(".took")
    assert page.one("body").value_of_css_property("background-color") == "rgba(15, 21, 20, 1)"
    assert page.texts("[data-output=topic] .text") == ["sport"]
