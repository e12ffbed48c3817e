"""The console's form begins with the sample and its file; the gallery fills it with the other examples."""

import shutil
from collections.abc import Callable
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.browser.page import ConsolePage
from tests.toolkit.processes import GatewayProcess, StartGateway

Console = Callable[..., ConsolePage]
ROOT = Path(__file__).parents[2]
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


def choose(page: ConsolePage, example: str) -> None:
    page.wait_for(".gallery button:last-child:enabled")
    page.browser.find_element(By.XPATH, f"//*[@class='gallery']/button[.='{example}']").click()
    page.wait_for(".gallery [aria-pressed=true]", example)


def held(page: ConsolePage, field: str) -> str:
    return str(page.one(f"[name={field}]").get_property("value"))


def pressed(page: ConsolePage) -> list[str]:
    return page.texts(".gallery [aria-pressed=true]")


def test_the_gallery_shows_each_image_and_fills_the_form(console: Console) -> None:
    page = console("ocr")
    page.wait_for(".gallery button:last-child:enabled")
    assert page.texts(".gallery button") == ["sample", "blank", "scribble"]
    sources = [each.get_attribute("src") for each in page.browser.find_elements(By.CSS_SELECTOR, ".gallery img")]
    assert len(set(sources)) == 3
    assert pressed(page) == ["sample"]
    choose(page, "blank")
    assert page.texts(".took") == []
    page.click("#run")
    page.wait_for(".notice.exit", "Early exit: no_text")
    assert page.texts(".problem") == []
    assert page.texts(".output .empty") == ["empty"] * 3
    page.browser.find_element(By.XPATH, "//button[.='Reset']").click()
    page.wait_for(".drop", "samples/sign.png")
    assert pressed(page) == ["sample"]


def test_an_example_sets_every_field(console: Console) -> None:
    page = console("write")
    page.fill("chunk_tokens", "9")
    choose(page, "function")
    fields = ("prompt", "max_tokens", "temperature", "seed", "chunk_tokens")
    assert [held(page, field) for field in fields] == ["def fibonacci(n):", "48", "0", "", "1"]
    page.fill("max_tokens", "5")
    assert pressed(page) == []
    page.click("#stream")
    page.wait_for_state("done")
    assert page.figure("tokens") == "5"


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
    assert pressed(page) == ["scribble"]


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
