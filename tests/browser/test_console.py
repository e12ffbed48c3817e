"""The console in a real Chromium, against the real gateway and Triton: answers, streams, chats and hostile texts."""

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess, StartGateway, running_gateway
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
BROKEN_WORDS = """
const words = [...document.querySelectorAll(".sample .word")];
return words.filter((word) => word.getClientRects().length !== 1).map((word) => word.textContent);
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


def test_ocr_draws_its_boxes_and_texts_on_the_image(console: Console) -> None:
    page = console("ocr")
    page.one("input[type=file]").send_keys(str(SAMPLES / "sign.png"))
    page.wait_for(".took")
    assert page.texts(".boxes .box text") == LINES
    assert page.texts(".bars li span") == LINES
    box, image = page.one(".boxes .box polygon").rect, page.one(".boxes img").rect
    assert image["x"] < box["x"]
    assert image["y"] < box["y"] < image["y"] + image["height"] / 3
    _, _, width, height = page.one(".boxes svg").get_dom_attribute("viewBox").split()
    assert image["height"] / image["width"] == pytest.approx(float(height) / float(width), rel=0.01)


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


@pytest.mark.parametrize("way", ["cancel", "another address", "another address before the start"])
def test_a_stream_is_cancelled(console: Console, gateway: GatewayProcess, way: str) -> None:
    """Another address ends it at once, even if the description of the next pipeline never arrives."""
    labels = {"pipeline": "scripted_patient", "transport": "stream", "outcome": "cancelled"}
    before, page = gateway.metric("requests_total", **labels), console("scripted_patient")
    page.fill("script", json.dumps({"outputs": 1000, "interval_s": 0.02}))
    if way == "another address before the start":
        page.browser.execute_script(HANG, "/v1/streams")
        page.click("#stream")
        page.browser.execute_script("location.hash = '#write'")
        page.wait_for("main h1", "write")
        page.browser.execute_script("release()")
        eventually(lambda: gateway.metric("requests_total", **labels) == before + 1)
        return
    page.click("#stream")
    page.wait_for_outputs(5)
    if way == "cancel":
        page.click("#cancel")
        page.wait_for("#stream:enabled")
    else:
        page.browser.execute_script(HANG, "/v1/pipelines/write")
        page.browser.execute_script("location.hash = '#write'")
    page.wait_for_state("cancelled")
    assert gateway.metric("requests_total", **labels) == before + 1


def test_run_is_first_for_a_model_with_one_response(console: Console) -> None:
    page = console("scripted")
    assert page.texts("main form .actions:first-of-type button") == ["Run", "Stream"]
    assert "streams" not in page.texts(".heading .chip")
    page = console("write")
    assert page.texts("main form .actions:first-of-type button") == ["Stream", "Run at once"]
    assert "streams" in page.texts(".heading .chip")
    streaming = {text.split()[0] for text in page.texts("#pipelines .title") if "streams" in text}
    assert streaming == {"write", "write_steps", "scripted_patient", "scripted_kept", "scripted_stream"}


def test_the_list_of_pipelines_has_a_filter(console: Console) -> None:
    page = console("write")
    page.one(".filter input").send_keys("ABOUT insights_t")
    page.wait_for(".filter small", "1 of 19")
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


@pytest.mark.parametrize("pipeline", ["ocr", "write", "insights"])
def test_a_phone_shows_the_form_first_with_large_targets(
    console: Console, screen: Callable[[int], None], pipeline: str
) -> None:
    page = console(pipeline)
    page.wait_for(".graph .node")
    screen(390)
    page.wait_for(".panels + .graph .node")
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert page.browser.execute_script(SMALL_TARGETS) == []
    assert page.browser.execute_script(BROKEN_WORDS) == []
    assert pipeline != "ocr" or "-F image=@samples/sign.png" in page.texts(".sample .word")


def test_a_change_of_width_before_the_first_effect_is_seen(browser: Chrome, gateway: GatewayProcess) -> None:
    browser.get(f"{gateway.url}/docs/errors")
    assert browser.execute_async_script(NARROWED) == ["wide", "narrow"]


def is_live(gateway: GatewayProcess) -> bool:
    try:
        return httpx.get(f"{gateway.url}/health/live").is_success
    except httpx.TransportError:
        return False


def test_triton_that_does_not_answer_is_shown_at_once_and_awaited(
    browser: Chrome, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """The state needs no other file of the page."""
    page = ConsolePage(browser)
    (tmp_path / "gateway.yaml").write_text("pipelines: {embed: {model: text_embed}}")
    with network_to(int(triton.grpc_url.split(":")[1])) as network:
        network.cut()
        settings = {"triton_url": f"127.0.0.1:{network.port}", "config": str(tmp_path / "gateway.yaml")}
        with running_gateway(tmp_path / "gateway", ready=False, **settings) as gateway:
            eventually(lambda: is_live(gateway))
            browser.execute_cdp_cmd("Network.enable", {})
            browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/console.js"]})
            browser.get(gateway.url)
            page.wait_for("#health.bad", "Triton does not answer")
            browser.execute_cdp_cmd("Network.disable", {})
            browser.refresh()
            page.wait_for("main .empty", "embed is not ready.")
            network.restore()
            page.wait_for("form[aria-label=Request] [name=TEXT]")
            page.wait_for("#health.good", "ready")


def test_every_step_is_shown_and_dark_where_the_user_wants_dark(
    console: Console, prefer: Callable[[str], None]
) -> None:
    page = console("insights")
    page.wait_for(".node")
    steps = ["request", "insights_gate", "text_embed", "feature_router", "head_topic", "head_sentiment", "response"]
    assert page.texts(".node text:first-of-type") == steps
    assert page.browser.get_log("browser") == [], "a file is missing, or the policy refused something"
    prefer("dark")
    page.click("#run")
    page.wait_for(".took")
    assert page.one("body").value_of_css_property("background-color") == "rgba(15, 21, 20, 1)"
    assert page.texts("[data-output=topic] .text") == ["sport"]


def open_chat(console: Console, pipeline: str) -> ConsolePage:
    page = console(pipeline)
    page.click(".tabs [role=tab]:nth-child(2)")
    page.wait_for(".compose")
    return page


def say(page: ConsolePage, text: str) -> None:
    page.fill("message", text)
    page.click("#send")


def test_a_chat_streams_its_answer_with_figures(
    console: Console, client: httpx.Client, axe: Callable[[], list[list[str]]]
) -> None:
    page = open_chat(console, "write")
    for name, value in (("max_tokens", "12"), ("temperature", "0")):
        control = page.one(f"#chat-{name}")
        control.clear()
        control.send_keys(value)
    say(page, "What is a list?")
    page.wait_for(".message[data-state=length] [data-figures]", "12 tokens")
    assert "first token after" in page.texts("[data-figures]")[0]
    say(page, "And a set?")
    page.wait_for(".message:nth-child(4)[data-state=length]")
    texts = [page.one(f".message:nth-child({n}) .text").get_property("textContent") for n in (1, 2, 3, 4)]
    messages = [{"role": ["user", "assistant"][n % 2], "content": text} for n, text in enumerate(texts)]
    body = {"model": "write", "messages": messages[:3], "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert texts[3] == answer["choices"][0]["message"]["content"]
    assert axe() == []


def test_stop_ends_the_answer_and_the_model(console: Console, gateway: GatewayProcess) -> None:
    labels = {"pipeline": "scripted_stream", "outcome": "cancelled"}
    before = gateway.metric("requests_total", **labels)
    page = open_chat(console, "scripted_stream")
    say(page, json.dumps({"outputs": 1000, "interval_s": 0.02, "texts": ["61"]}))
    page.wait_for(".message[data-role=assistant] .text", "aa")
    page.click("#stop")
    page.wait_for(".message[data-state=stopped] [data-figures]", "stopped")
    eventually(lambda: gateway.metric("requests_total", **labels) == before + 1)
    page.wait_for("#send")


def test_a_failed_answer_is_explained(console: Console) -> None:
    page = open_chat(console, "scripted_stream")
    say(page, json.dumps({"outputs": 0, "then": "error"}))
    page.wait_for(".message .problem a", "model_error")


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
    page.wait_for("[data-output=text]", MARKUP)
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
