"""The console's form, examples, answer and history: what a user enters is kept, sent, explained and compared."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess, StartGateway

Console = Callable[..., ConsolePage]
ROOT = Path(__file__).parents[2]
FILLED = """
const [field, fill, done] = arguments;
import("/console/fields.js").then(({ filled }) => done(JSON.parse(filled(field, fill))));
"""
PASTE = """
const clipboardData = new DataTransfer();
clipboardData.setData("text", "data:image/png;base64,iVBORw0KGgo=");
document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true }));
"""
BEYOND_INT64 = "99999999999999999999"
"""A value that only the gateway refuses: JavaScript has no exact bound of INT64."""
SCORES = """
const [numbers, done] = arguments;
Promise.all([import("/console/lib.js"), import("/console/tensor.js")]).then(([{ html, render }, { Tensor }]) => {
  const place = document.createElement("div");
  place.id = "scores";
  document.querySelector("main").replaceChildren(place);
  render(html`<${Tensor} name="scores" value=${numbers} />`, place);
  done();
});
"""

RESULT = """
const [outputs, values, done] = arguments;
Promise.all([import("/console/lib.js"), import("/console/result.js")]).then(([{ html, render }, { Result }]) => {
  const place = document.createElement("div");
  const image = { url: document.querySelector(".brand img").src, width: 200, height: 100 };
  document.querySelector("main").replaceChildren(place);
  render(html`<${Result} pipeline=${{ outputs, inputs: [] }} sent=${{}} values=${values} image=${image} />`, place);
  done();
});
"""


def held(page: ConsolePage, field: str) -> str:
    return str(page.one(f"[name={field}]").get_property("value"))


def test_control_and_enter_send_from_everywhere(console: Console) -> None:
    """In a field, on the link of the pipeline, which would open a new tab, and in the chat."""
    page = console("insights")
    page.fill("text", "The parliament voted.")
    send_by_keys(page)
    page.wait_for("[data-output=topic]", "politics")
    page.fill("text", "The striker scored.")
    page.browser.execute_script("document.querySelector('#pipelines [aria-current]').focus()")
    send_by_keys(page)
    page.wait_for("[data-output=topic]", "sport")
    assert len(page.browser.window_handles) == 1
    page = console("write")
    page.browser.find_element(By.XPATH, "//*[@role='tab'][.='Chat']").click()
    page.wait_for(".compose")
    page.fill("message", "What is a list?")
    page.one("#chat-max_tokens").click()
    send_by_keys(page)
    page.wait_for(".message[data-role=assistant]")


def send_by_keys(page: ConsolePage) -> None:
    ActionChains(page.browser).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()


def test_values_are_kept_when_one_switches_pipelines(console: Console) -> None:
    page = console("insights")
    page.fill("text", "kept")
    page.click("#pipelines a[href='#embed']")
    page.wait_for("main h1", "embed")
    page.click("#pipelines a[href='#insights']")
    page.wait_for("main h1", "insights")
    assert held(page, "text") == "kept"
    page.browser.find_element(By.XPATH, "//button[.='Reset']").click()
    assert held(page, "text").startswith("The striker")


def test_fields_have_their_descriptions(console: Console) -> None:
    page = console("write")
    assert page.one("#field-max_tokens-description").text == "The most tokens that an answer has."
    assert "field-max_tokens-description" in str(page.one("[name=max_tokens]").get_attribute("aria-describedby"))
    page = console("ocr")
    assert page.texts("form[aria-label=Request] .field p.small") == ["A photo or scan with printed text."]


def test_a_link_carries_the_inputs(browser: Any, gateway: GatewayProcess) -> None:
    page = ConsolePage(browser)
    browser.get(f"{gateway.url}/#write?prompt={quote('a & b? <i>#1</i>')}&max_tokens=5")
    page.wait_for("main h1", "write")
    assert (held(page, "prompt"), held(page, "max_tokens"), held(page, "seed")) == ("a & b? <i>#1</i>", "5", "7")
    made = browser.execute_async_script("""
        const done = arguments[0];
        const field = (name, control) => ({ name, control });
        import("/console/link.js").then(({ linkTo }) =>
            done(linkTo("write", [field("prompt"), field("file", "file")], { prompt: "a & b? <i>#1</i>", file: {} })));
    """)
    browser.get("about:blank")
    browser.get(made)
    page.wait_for("main h1", "write")
    assert held(page, "prompt") == "a & b? <i>#1</i>"


def test_an_error_is_shown_at_its_field_without_a_stale_answer(console: Console) -> None:
    page = console("write")
    page.click("#run")
    page.wait_for("[data-output=text]")
    page.fill("seed", BEYOND_INT64)
    page.wait_for(".meta", "the form has changed")
    page.click("#run")
    page.wait_for(".field-error", "must be an integer <= 9223372036854775807")
    assert page.texts("[data-output]") == []
    assert page.texts(".meta .chip")[0].endswith("422")
    assert page.browser.switch_to.active_element.get_attribute("name") == "seed"
    page.fill("seed", "5")
    assert page.texts(".field-error") == []


def test_range_errors_are_shown_before_a_request_is_sent(console: Console) -> None:
    page = console("write")
    sent = "return performance.getEntriesByName(location.origin + '/v1/pipelines/write').length"
    before = page.browser.execute_script(sent)
    page.fill("max_tokens", "9999")
    page.wait_for(".field-error", "must be an integer from 1 to 512")
    page.one("[name=prompt]").send_keys(Keys.CONTROL, "a", Keys.BACKSPACE)
    page.fill("temperature", "2.5")
    page.click("#run")
    page.wait_for(".field-error", "Enter a value.")
    expected = ["Enter a value.", "an integer from 1 to 512.", "a number from 0 to 2."]
    assert all(text.endswith(end) for text, end in zip(page.texts(".field-error"), expected, strict=True))
    assert page.browser.switch_to.active_element.get_attribute("name") == "prompt"
    assert page.browser.execute_script(sent) == before


def test_history_runs_again_and_shows_the_difference(console: Console) -> None:
    page = console("insights")
    page.click("#run")
    page.wait_for("[data-output=topic]", "sport")
    page.fill("text", "Markets fell today.")
    page.click("#run")
    page.wait_for("[data-output=topic]", "business")
    page.click(".history summary")
    page.browser.find_element(By.XPATH, "//button[.='Compare']").click()
    page.wait_for(".compared", "answer topic")
    row = next(text for text in page.texts(".compared tbody tr") if text.startswith("answer topic "))
    assert row.split()[-2:] == ["sport", "business"]
    page.click(".history li:nth-child(2) button:nth-child(2)")
    page.wait_for("[data-output=topic]", "sport")
    assert held(page, "text").startswith("The striker")
    assert len(page.texts(".history li")) == 3


def test_raw_and_headers_of_an_answer(console: Console) -> None:
    page = console("embed")
    page.click("#run")
    page.wait_for("[data-output=embedding] .figures", "[384]")
    page.browser.find_element(By.XPATH, "//button[.='Raw']").click()
    assert len(json.loads(page.one(".sent").text)["embedding"]) == 384
    page.browser.find_element(By.XPATH, "//button[.='Headers']").click()
    names = page.texts(".headers dt")
    assert {"content-type", "server-timing", "x-request-id"} <= set(names)


def test_the_calls_of_a_pipeline_are_those_of_the_catalog(console: Console, client: httpx.Client) -> None:
    """The tests of the catalog run them."""
    page, samples = console("write"), client.get("/v1/pipelines/write").json()["samples"]
    titles = page.texts(".samples [role=tab]")
    assert titles == ["curl", "Python", "JavaScript", "stream"]
    for title, language in zip(titles, ("curl", "python", "javascript", "curl_stream"), strict=True):
        page.browser.find_element(By.XPATH, f"//*[@role='tab'][.='{title}']").click()
        page.wait_for(f".samples [role=tabpanel][aria-label={title}] pre")
        assert page.one(".samples pre").get_property("textContent") == samples[language]


def test_a_pasted_image_is_the_file_of_the_form(console: Console) -> None:
    page = console("ocr")
    page.browser.execute_script(PASTE)
    page.wait_for(".drop small", "pasted")


def test_templates_fill_a_tensor(console: Console) -> None:
    page = console("embed")
    field = {"input": {"datatype": "FP32", "shape": [2, 2]}}
    expected = {"zeros": [[0, 0], [0, 0]], "ones": [[1, 1], [1, 1]], "counting": [[0, 1], [2, 3]]}
    assert {fill: page.browser.execute_async_script(FILLED, field, fill) for fill in expected} == expected


def test_a_thousand_scores_show_the_highest(console: Console) -> None:
    page = console("embed")
    page.browser.execute_async_script(SCORES, [index / 1000 for index in range(1000)])
    page.wait_for("#scores .figures", "[1000]")
    assert page.texts(".bars li span") == [f"#{index}" for index in range(999, 989, -1)]
    page.click("#scores button")
    assert len(page.texts(".bars li")) == 1000


@pytest.mark.parametrize(
    ("description", "box"),
    [
        ("In pixels.", [50, 20, 150, 60]),
        ("As xywh, in pixels.", [50, 20, 100, 40]),
        ("cxcywh", [100, 40, 100, 40]),
        ("Shares of the image.", [0.25, 0.2, 0.75, 0.6]),
    ],
)
def test_boxes_of_four_numbers_are_drawn_where_they_are(console: Console, description: str, box: list[float]) -> None:
    """Outputs keep the order of the file; an output between two others is no exception."""
    page, number = console("embed"), {"kind": "number", "datatype": "FP32"}
    outputs = [
        {"name": "count", **number, "shape": [1], "datatype": "INT32", "description": ""},
        {"name": "scores", **number, "shape": [-1], "description": ""},
        {"name": "boxes", **number, "shape": [-1, 4], "description": description},
        {"name": "labels", "kind": "text", "datatype": "BYTES", "shape": [-1], "description": ""},
        {"name": "more", **number, "shape": [-1], "description": ""},
    ]
    values = {"count": [1], "scores": [0.9], "boxes": [box], "labels": ["cat"], "more": [0.25, 0.5]}
    page.browser.execute_async_script(RESULT, outputs, values)
    assert page.texts(".output h3") == ["count", "scores", "boxes", "more"]
    assert page.one(".boxes polygon").get_dom_attribute("points") == "50,20 150,20 150,60 50,60"
    assert page.texts(".boxes text") == ["cat"]
    assert page.texts(".bars li span") == ["cat", "#0", "#1"]


def test_four_numbers_that_are_no_box_are_shown_as_numbers(console: Console) -> None:
    page = console("embed")
    outputs = [{"name": "boxes", "kind": "number", "datatype": "FP32", "shape": [-1, 4], "description": ""}]
    page.browser.execute_async_script(RESULT, outputs, {"boxes": [[50, 20, 40, 10]]})
    assert page.texts(".output pre") == ["[[50,20,40,10]]"]


def test_axe_finds_nothing(console: Console, axe_in_both_schemes: Callable[[], list[list[str]]]) -> None:
    page = console("ocr")
    page.one("input[type=file]").send_keys(str(ROOT / "samples" / "sign.png"))
    page.wait_for(".took")
    page.click(".history summary")
    assert axe_in_both_schemes() == []
    page.browser.get(page.browser.current_url.split("#")[0] + "#write")
    page.wait_for("main h1", "write")
    page.fill("prompt", "x")
    page.click("#stream")
    page.wait_for_state("done")
    assert axe_in_both_schemes() == []
    assert page.browser.get_log("browser") == []


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


LINES = ["Hello Triton gateway", "Open daily 9 to 18", "Please ring the bell"]
CONFIG = """
pipelines:
  ocr:
    model: ocr_ensemble
    inputs: {image: {tensor: IMAGE, kind: image}}
    warmup: false
    sample: {image: absent.png}
    examples: {photo: {image: photo.png}}
"""
WITH_FILES = """
const [draft, sample, done] = arguments;
import("/console/examples.js").then(({ withFiles }) => done(withFiles(draft, sample)));
"""


PRESSED = ".gallery [aria-pressed=true]"


def choose(page: ConsolePage, example: str) -> None:
    page.wait_for(".gallery button:last-child:enabled")
    page.browser.find_element(By.XPATH, f"//*[@class='gallery']/button[.='{example}']").click()
    page.wait_for(PRESSED, example)


def test_the_gallery_shows_each_image_and_fills_the_form(console: Console) -> None:
    page = console("ocr")
    page.wait_for(".gallery button:last-child:enabled")
    assert page.texts(".gallery button") == ["sample", "blank", "scribble"]
    sources = [each.get_attribute("src") for each in page.browser.find_elements(By.CSS_SELECTOR, ".gallery img")]
    assert len(set(sources)) == 3
    assert page.texts(PRESSED) == ["sample"]
    choose(page, "blank")
    assert page.texts(".took") == []
    page.click("#run")
    page.wait_for(".notice.exit", "Early exit: no_text")
    assert page.texts(".problem") == []
    assert page.texts(".output .empty") == ["empty"] * 3
    page.browser.find_element(By.XPATH, "//button[.='Reset']").click()
    page.wait_for(".drop", "samples/sign.png")
    assert page.texts(PRESSED) == ["sample"]


def test_an_example_sets_every_field(console: Console) -> None:
    page = console("write")
    page.fill("chunk_tokens", "9")
    choose(page, "function")
    fields = ("prompt", "max_tokens", "temperature", "seed", "chunk_tokens")
    assert [held(page, field) for field in fields] == ["def fibonacci(n):", "48", "0", "", "1"]
    page.fill("max_tokens", "5")
    assert page.texts(PRESSED) == []
    page.click("#stream")
    page.wait_for_state("done")
    assert page.figure("tokens") == "5"


def test_the_slow_example_can_be_watched_resumed_and_cancelled(console: Console) -> None:
    page = console("write")
    choose(page, "slow")
    page.click("#stream")
    page.wait_for_outputs(5)
    assert not page.written.startswith("\n")
    page.click(".try summary")
    page.click("#drop")
    page.wait_for_state("lost")
    page.wait_for_state("live")
    page.wait_for_outputs(int(page.figure("tokens")) + 5)
    page.click("#cancel")
    page.wait_for_state("cancelled")


def test_a_list_of_an_example_is_sent(console: Console) -> None:
    page = console("insights")
    choose(page, "own-topics")
    assert held(page, "topics") == "animals\ncars\nweather"
    page.click("#run")
    page.wait_for("[data-output=topic]", "animals")


def test_a_chosen_example_is_kept_when_one_switches_pipelines(console: Console) -> None:
    page = console("ocr")
    choose(page, "scribble")
    page.click("#pipelines a[href='#embed']")
    page.wait_for("main h1", "embed")
    assert page.texts(".gallery") == []
    page.click("#pipelines a[href='#ocr']")
    page.wait_for(".gallery button:last-child:enabled")
    page.wait_for(".drop", "samples/scribble.png")
    assert page.texts(PRESSED) == ["scribble"]


def test_a_file_can_be_chosen_again_after_an_example(console: Console) -> None:
    page = console("ocr")
    for _ in range(2):
        page.one("input[type=file]").send_keys(str(ROOT / "samples" / "sign.png"))
        page.wait_for(".bars", LINES[0])
        choose(page, "blank")
        page.click("#run")
        page.wait_for(".notice.exit")


def test_the_sample_does_not_replace_a_file_of_the_user(console: Console) -> None:
    page = console("ocr")
    draft, sample = {"image": {"name": "mine"}, "mask": None}, {"image": {"name": "a"}, "mask": {"name": "b"}}
    found = page.browser.execute_async_script(WITH_FILES, draft, sample)
    assert found == {"image": {"name": "mine"}, "mask": {"name": "b"}}


def test_an_example_that_cannot_be_loaded_says_why(
    browser: Chrome, start_gateway: StartGateway, tmp_path: Path
) -> None:
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    shutil.copy(ROOT / "samples" / "sign.png", tmp_path / "photo.png")
    gateway: GatewayProcess = start_gateway(config=str(tmp_path / "gateway.yaml"))
    page = ConsolePage(browser)
    page.open(gateway.url, "ocr")
    page.wait_for("form .field-error", "The example sample cannot be loaded: A file of this example cannot be read")
    choose(page, "photo")
    page.click("#run")
    page.wait_for(".answer", LINES[0])
