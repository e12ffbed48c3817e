"""The tab Speak of the console: a real Chromium with a fake microphone, a real gateway and a real Triton."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome

from app.api.sessions.open_sessions import SessionReason
from app.api.streaming import RequestReason
from app.http1.websocket import CloseReason
from tests.browser.conftest import running_chromium
from tests.browser.page import ConsolePage, Firefox
from tests.conftest import Require
from tests.live.test_speech import SAMPLE, SAMPLE_TEXT, has_espeak, room, silence, speak, wave_file
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.waiting import eventually

PHRASES = ("good morning how are you", "we are going to the market tomorrow")
FAKE_DEVICE = "--use-fake-device-for-media-stream"
RECORD = """
window.states = [];
new MutationObserver(() => {
  const speak = document.querySelector(".speak");
  const text = (selector) => speak.querySelector(selector)?.textContent ?? "";
  const { length } = speak.querySelector(".score")?.getAttribute("d") ?? "";
  const sent = Number.parseFloat(text(".seconds"));
  window.states.push({ state: speak.dataset.state, partial: text(".partial"), score: length, sent });
}).observe(document.querySelector(".speak"), { subtree: true, childList: true, characterData: true, attributes: true });
"""
"""Records what the page shows at each change."""
EXPLAINED = """
const [closes, done] = arguments;
import("/console/listening.js").then(({ problemOfClose }) => done(closes.map((close) => problemOfClose(...close))));
"""


USE_SAMPLE = """
async () => {
  const until = async (find) => {
    while (!find()) await new Promise((resolve) => setTimeout(resolve, 50));
  };
  await until(() => document.querySelector("#use-sample"));
  document.querySelector("#use-sample").click();
  await until(() => document.querySelector(".speak").dataset.state === "ended");
  return [document.querySelector(".speak .final").textContent, document.querySelector(".speak .problem")];
}
"""


@pytest.fixture(scope="module")
def speaker(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A Chromium whose microphone hears two phrases once, and then silence."""
    require(has_espeak(), "there is no espeak-ng: `make system-packages` installs it")
    sound = tmp_path_factory.mktemp("sound") / "speech.wav"
    phrases = [each for text in PHRASES for each in (speak(text), silence(1))]
    sound.write_bytes(wave_file(room(silence(0.5), *phrases, silence(60))))
    flags = ("--use-fake-ui-for-media-stream", f"--use-file-for-fake-audio-capture={sound}%noloop")
    with running_chromium(require, tmp_path_factory, FAKE_DEVICE, *flags) as browser:
        yield browser


def opened(browser: Chrome, url: str) -> ConsolePage:
    browser.get("about:blank")
    browser.get_log("browser")
    page = ConsolePage(browser)
    page.open(url, "listen")
    page.wait_for(".speak")
    browser.execute_script(RECORD)
    return page


def states(page: ConsolePage) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.browser.execute_script("return window.states")
    return found


def has_no_session(gateway: GatewayProcess) -> bool:
    return gateway.metric("open_sessions", pipeline="listen") == 0


def wait_for_the_sample(page: ConsolePage) -> None:
    page.wait_for(".speak[data-state=ended]")
    assert (page.texts(".speak .final"), page.texts(".speak .problem")) == ([SAMPLE_TEXT], [])


def test_text_and_score_come_back_while_sound_goes_up(speaker: Chrome, gateway: GatewayProcess) -> None:
    """A busy machine drops some of the fake microphone's sound, so some words may be missing."""
    page = opened(speaker, gateway.url)
    page.click("#speak")
    page.wait_for(".speak .final", PHRASES[1].split()[-1])
    page.wait_for("#speak", "Stop")
    page.click("#speak")
    page.wait_for(".speak[data-state=ended]")
    expected, heard = " ".join(PHRASES).split(), page.texts(".speak .final")[0].split()
    assert len(set(expected) & set(heard)) >= 0.75 * len(set(expected)), heard
    assert page.texts(".speak .problem") == []
    assert speaker.get_log("browser") == [], "for instance the Content-Security-Policy"
    live = [each for each in states(page) if each["state"] == "live"]
    first_score, first_word = (next(each for each in live if each[key]) for key in ("score", "partial"))
    assert first_score["sent"] < first_word["sent"] < live[-1]["sent"]
    assert len({each["partial"] for each in live}) > 5
    eventually(lambda: has_no_session(gateway))


def test_leaving_the_pipeline_ends_the_session(speaker: Chrome, gateway: GatewayProcess) -> None:
    page = opened(speaker, gateway.url)
    page.click("#speak")
    page.wait_for(".speak[data-state=live]")
    assert not has_no_session(gateway)
    page.click("#pipelines a[href='#embed']")
    eventually(lambda: has_no_session(gateway))


def test_a_refused_microphone_is_explained(
    require: Require, gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = (FAKE_DEVICE, "--use-fake-ui-for-media-stream=deny")
    with running_chromium(require, tmp_path_factory, *flags) as browser:
        page = opened(browser, gateway.url)
        page.click("#speak")
        page.wait_for(".speak .problem", "The browser does not let this page use the microphone")
        page.wait_for(".speak[data-state=ended] #speak", "Speak")


def test_the_sample_needs_no_microphone(
    browser: Chrome, gateway: GatewayProcess, axe_in_both_schemes: Callable[[], list[list[str]]]
) -> None:
    page = opened(browser, gateway.url)
    assert page.texts(".tabs [role=tab]") == ["Speak", "Requests"]
    page.click("#use-sample")
    wait_for_the_sample(page)
    assert len({each["partial"] for each in states(page)}) > 3
    label = page.one(".sound svg").get_dom_attribute("aria-label")
    assert label.startswith("4 seconds of sound; speech from 0."), label
    assert axe_in_both_schemes() == []


def test_the_sample_is_heard_in_firefox(firefox: Firefox, gateway: GatewayProcess) -> None:
    firefox.open(f"{gateway.url}/#listen")
    assert firefox.call(USE_SAMPLE) == [SAMPLE_TEXT, None]


def test_a_file_replaces_the_microphone(browser: Chrome, gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("This is no sound.")
    page = opened(browser, gateway.url)
    page.one(".speak [type=file]").send_keys(str(tmp_path / "notes.txt"))
    page.wait_for(".speak .problem", "The browser cannot play this file")
    page.one(".speak [type=file]").send_keys(str(SAMPLE))
    wait_for_the_sample(page)


def test_a_model_without_a_free_place_is_explained(
    browser: Chrome, client: httpx.Client, gateway: GatewayProcess
) -> None:
    page = opened(browser, gateway.url)
    answers = [client.post("/v1/pipelines/listen/sessions") for _ in range(5)]
    assert [each.status_code for each in answers] == [201, 201, 201, 201, 429]
    page.click("#use-sample")
    page.wait_for(".speak .problem a", "too_many_requests")
    for opening in answers[:4]:
        client.delete(opening.headers["Location"])
    eventually(lambda: has_no_session(gateway))
    page.click("#use-sample")
    wait_for_the_sample(page)


def test_each_close_code_is_explained(console: Callable[..., ConsolePage]) -> None:
    page = console("listen")
    closes = [
        (code, "" if reason is CloseReason.TOO_LARGE else str(reason))
        for reason in (*CloseReason, *RequestReason, *SessionReason)
        if (code := reason.code)
    ]
    closes.append((1006, ""))
    shown = page.browser.execute_async_script(EXPLAINED, closes)
    titles = [each and each["title"] for each in shown]
    assert len(set(titles)) > 10
    assert "The connection was closed" not in titles
    assert page.browser.execute_async_script(EXPLAINED, [(1000, ""), (4999, "odd")]) == [
        None,
        {"title": "The connection was closed", "detail": "The code is 4999 odd."},
    ]


def test_the_form_runs_one_step_of_a_session(console: Callable[..., ConsolePage], gateway: GatewayProcess) -> None:
    page = console("listen")
    page.click(".tabs [role=tab]:nth-child(2)")
    page.wait_for(".drop", SAMPLE.name)
    assert "sessions" in page.texts(".samples pre")[0]
    page.click("#run")
    page.wait_for("[data-output=text]", SAMPLE_TEXT)
    eventually(lambda: has_no_session(gateway))


def test_a_session_is_opened_stepped_and_ended(console: Callable[..., ConsolePage], gateway: GatewayProcess) -> None:
    page = console("listen")
    page.click(".tabs [role=tab]:nth-child(2)")
    page.wait_for(".drop", SAMPLE.name)
    page.click("#open")
    page.wait_for("[data-session=open]", "0 steps answered")
    for step in (1, 2):
        page.click("#step")
        page.wait_for(".took", f"step {step}")
        page.wait_for("#step", f"Send step {step + 1}")
    assert gateway.metric("open_sessions", pipeline="listen") == 1
    page.click("#last-step")
    page.wait_for("[data-session=none]", "The session has ended: 3 steps answered.")
    eventually(lambda: has_no_session(gateway))
    for leave in ("#end", "#pipelines a[href='#embed']"):
        page.click("#open")
        page.wait_for("[data-session=open]")
        page.click(leave)
        eventually(lambda: has_no_session(gateway))
