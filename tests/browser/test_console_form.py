"""The console's form, answer and history: what a user enters is kept, sent, explained and compared; also streams."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.page import ConsolePage
from tests.conftest import Require
from tests.toolkit.processes import GatewayProcess

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
PROGRAMS = {"curl": ["bash", "-c"], "stream": ["bash", "-c"], "JavaScript": ["node", "--input-type=module", "-e"]}
SEPARATOR = "\x1e"
EACH = f"""
import sys
for code in sys.argv[1:]:
    print({SEPARATOR!r}, end="")
    exec(code, {{"__name__": "__main__"}})
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


def write(page: ConsolePage, field: str, text: str, *keys: str) -> None:
    page.fill(field, text)
    if keys:
        ActionChains(page.browser).key_down(Keys.CONTROL).send_keys(*keys).key_up(Keys.CONTROL).perform()


def held(page: ConsolePage, field: str) -> str:
    return str(page.one(f"[name={field}]").get_property("value"))


def test_control_and_enter_send_the_form(console: Console) -> None:
    page = console("insights")
    write(page, "text", "The parliament voted.", Keys.ENTER)
    page.wait_for("[data-output=topic]", "politics")


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


def test_the_calls_of_a_pipeline_work_as_pasted(console: Console, require: Require, tmp_path: Path) -> None:
    require(shutil.which("curl") and shutil.which("node"), "there is no curl or no node")
    page = console("write")
    languages = page.texts(".samples [role=tab]")
    assert languages == ["curl", "Python", "JavaScript", "stream"]
    *whole, streamed = outcomes_of(languages, [call_of(page, title) for title in languages], tmp_path)
    assert all("finish_reason" in text and "early_exit" not in text for text in whole), whole
    assert "finish_reason" in streamed
    assert "early_exit" in streamed


def test_a_pasted_image_is_the_file_of_the_form(console: Console) -> None:
    page = console("ocr")
    page.browser.execute_script(PASTE)
    page.wait_for(".drop small", "pasted")


def call_of(page: ConsolePage, title: str) -> str:
    page.browser.find_element(By.XPATH, f"//*[@role='tab'][.='{title}']").click()
    page.wait_for(f".samples [role=tabpanel][aria-label={title}] pre")
    return str(page.one(".samples pre").get_property("textContent"))


def outcomes_of(titles: list[str], codes: list[str], folder: Path) -> list[str]:
    """What the calls print. Those of Python run in one process, because its imports take a second."""
    calls = list(zip(titles, codes, strict=True))
    python = [code for title, code in calls if title not in PROGRAMS]
    printed = iter(output_of([sys.executable, "-c", EACH, *python], folder).split(SEPARATOR)[1:] if python else ())
    return [
        output_of([*PROGRAMS[title], code], folder) if title in PROGRAMS else next(printed) for title, code in calls
    ]


def output_of(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


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
