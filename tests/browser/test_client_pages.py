"""The documented clients work as printed, and other readers of events: in Python, in Node and in a browser."""

import contextlib
import io
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from selenium.webdriver import Chrome

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.test_documented_commands import is_the_same
from tests.toolkit.environments import npm_environment
from tests.toolkit.events import checked, parsed
from tests.toolkit.processes import GatewayProcess, configured_gateway
from tests.toolkit.programs import output_of
from tests.toolkit.proxy import DroppingNetwork, network_to
from tests.toolkit.waiting import eventually

HOW_TO = ROOT / "docs" / "how-to"
JAVASCRIPT = "javascript.md"
NODE, BROWSER = "Node:", "Browser:"
"""The starts of the headings of the sections that run only there."""
PRINTED = "http://127.0.0.1:8080"
SEPARATOR = "=====\n"
PAGE = """<!doctype html>
<input type="file" id="photo">
<pre id="printed"></pre>
<script type="module">
const printed = document.querySelector("#printed");
console.log = (...words) => printed.append(words.join(" "), "\\n");
addEventListener("unhandledrejection", (event) => console.log(event.reason, "The end."));
document.querySelector("#photo").addEventListener("change", async () => {
%s
console.log("The end.");
});
</script>
"""


HTML = f"""
const html = {{ "Content-Type": "text/html" }};
await ok(new Response("<html>", {{ status: 413, headers: html }})).catch(({{ code, message }}) =>
  console.log("{SEPARATOR.strip()}\\n" + code, message));
"""
"""A proxy's own error is an error of the program too."""
ERROR_OF_HTML = "http_413 The answer was 413.\n"


@pytest.fixture(scope="module")
def limited(
    triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GatewayProcess, DroppingNetwork]]:
    pipelines = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]
    pipelines["write"]["limits"] = {"in_flight": 1, "queue": 0}
    shown = {name: pipelines[name] for name in ("write", "ocr")}
    with open_to_files(triton, {"pipelines": shown}, tmp_path_factory.mktemp("limited")) as gateway:
        port = urlsplit(gateway.url).port
        assert port
        with network_to(port, DroppingNetwork) as network:
            yield gateway, network


def blocks(page: str, language: str, skipped: str = "") -> list[tuple[str, str]]:
    """Returns the code and the printed output of each block outside of the skipped sections."""
    pairs = itertools.pairwise([*blocks_of(HOW_TO / page, skipped), ("", "")])
    return [
        (text, next_text if following == "text" else "")
        for (own, text), (following, next_text) in pairs
        if own == language
    ]


def check(page: str, language: str, answered: str, skipped: str = "") -> None:
    """Compares ``answered``, the output of all blocks with a separator before each, with the page."""
    printed = [text for _, text in blocks(page, language, skipped)] + [ERROR_OF_HTML] * (language == "js")
    for wanted, got in zip(printed, answered.split(SEPARATOR)[1:], strict=True):
        assert is_the_same(wanted, got), f"{page} says {wanted}, but: {got}"


def program(skipped: str, network: DroppingNetwork) -> str:
    """Returns the blocks of javascript.md as one program, without those that only the other kind of program runs."""
    parts = [f'console.log("{SEPARATOR.strip()}");\n{text}' for text, _ in blocks(JAVASCRIPT, "js", skipped)]
    return "\n".join([*parts, HTML]).replace(PRINTED, network.url)


def test_the_python_page_works_as_printed(
    limited: tuple[GatewayProcess, DroppingNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, network = limited
    dropped = network.dropped
    monkeypatch.chdir(ROOT)
    defined: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for text, _ in blocks("python-client.md", "python"):
            printed.write(SEPARATOR)
            exec(text.replace(PRINTED, network.url), defined)
        with ThreadPoolExecutor() as pool, contextlib.closing(defined["gateway"]):
            rejected = gateway.metric("rejected_total")
            body = {"prompt": "The for statement", "max_tokens": 64}
            answers = list(pool.map(defined["ask"], ["/v1/pipelines/write"] * 4, [body] * 4))
    check("python-client.md", "python", printed.getvalue())
    assert network.dropped == dropped + 1
    assert len(answers) == 4
    assert gateway.metric("rejected_total") > rejected


def test_the_javascript_page_works_as_printed_in_node_and_in_a_browser(
    limited: tuple[GatewayProcess, DroppingNetwork], tmp_path: Path, require: Require, browser: Chrome
) -> None:
    require(shutil.which("node"), "there is no node")
    gateway, network = limited
    dropped, rejected = network.dropped, gateway.metric("rejected_total")
    script = tmp_path / "client.mjs"
    script.write_text(program(BROWSER, network))
    done = subprocess.run(["node", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    check(JAVASCRIPT, "js", done.stdout, BROWSER)
    assert network.dropped == dropped + 1
    assert gateway.metric("rejected_total") > rejected
    dropped, rejected = network.dropped, gateway.metric("rejected_total")
    file = tmp_path / "page.html"
    file.write_text(PAGE % program(NODE, network))
    page = ConsolePage(browser)
    browser.get(file.as_uri())
    page.one("#photo").send_keys(str(ROOT / "samples" / "blank.png"))
    page.wait_for("#printed", "The end.")
    answered = str(page.one("#printed").get_property("textContent"))
    check(JAVASCRIPT, "js", answered.removesuffix("The end.\n"), NODE)
    assert network.dropped >= dropped + 2  # a reader that was cut before its first event reads from the start again
    assert gateway.metric("rejected_total") > rejected


FILE = ROOT / "docs" / "tutorials" / "llm_in_a_browser" / "write.html"
SEED = 7
"""With other seeds the model may end the text after a few tokens."""
STOP_AT_THE_FIRST_TOKEN = """
const [text, stop] = ["text", "stop"].map((id) => document.getElementById(id));
new MutationObserver(() => text.textContent && stop.click()).observe(text, {childList: true});
"""


@pytest.fixture(scope="module")
def open_gateway(
    triton: EmbeddedTriton, config_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway that allows calls from pages opened as files, and writes a text of 512 tokens."""
    config = yaml.safe_load(config_path.read_text())
    config["pipelines"]["write"]["parameters"]["seed"] = {"type": "integer", "default": SEED}
    with open_to_files(triton, config, tmp_path_factory.mktemp("open")) as process:
        yield process


@contextmanager
def open_to_files(triton: EmbeddedTriton, config: dict[str, Any], folder: Path) -> Iterator[GatewayProcess]:
    (folder / "samples").symlink_to(ROOT / "samples")
    text = yaml.safe_dump(config, sort_keys=False)
    with configured_gateway(triton, folder, text, cors_origins="null", drain_s="1") as process:
        yield process


@pytest.fixture
def opened(browser: Chrome, open_gateway: GatewayProcess) -> ConsolePage:
    page = ConsolePage(browser)
    browser.get(f"{FILE.as_uri()}?gateway={open_gateway.url}")
    return page


def text_of(page: ConsolePage) -> str:
    return str(page.one("#text").get_property("textContent"))


def stored_text(page: ConsolePage, gateway: GatewayProcess) -> str:
    """Returns the complete text of the page's stream, read from the gateway."""
    path = urlsplit(page.browser.execute_script("return history.state.stream")).path
    events = checked(parsed(httpx.get(gateway.url + path, timeout=30).text))
    return "".join(event.data["text"] for event in events[:-1])


def test_a_reload_shows_the_stream_again(opened: ConsolePage, open_gateway: GatewayProcess) -> None:
    opened.click("#write")
    opened.wait_for("#state", "Done.")
    text = text_of(opened)
    assert len(text) > 100
    assert text == stored_text(opened, open_gateway)
    opened.browser.refresh()
    opened.wait_for("#state", "Done.")
    assert text_of(opened) == text


def test_the_page_resumes_after_a_lost_connection(
    browser: Chrome, open_gateway: GatewayProcess, opened: ConsolePage
) -> None:
    port = urlsplit(open_gateway.url).port
    assert port
    with network_to(port, DroppingNetwork) as network:
        browser.get(f"{FILE.as_uri()}?gateway={network.url}")
        opened.click("#write")
        opened.wait_for("#state", "The connection was lost.")
        opened.wait_for("#state", "Done.")
        assert network.dropped == 1
        assert text_of(opened) == stored_text(opened, open_gateway)


def test_stop_cancels_the_stream(browser: Chrome, triton: EmbeddedTriton, tmp_path: Path) -> None:
    """The prompt of this `write` is a script, slow enough that a busy browser can stop it."""
    write = {
        "model": "scripted_stream",
        "inputs": {"prompt": {"tensor": "SCRIPT", "kind": "text"}},
        "parameters": {"max_tokens": {"type": "integer", "optional": True}},
        "outputs": {"text": {"tensor": "TEXT", "kind": "text"}},
        "stream": True,
    }
    script = json.dumps({"outputs": 1000, "interval_s": 0.05, "texts": ["61"]})
    page = ConsolePage(browser)
    with open_to_files(triton, {"pipelines": {"write": write}}, tmp_path) as gateway:
        browser.get(f"{FILE.as_uri()}?gateway={gateway.url}")
        browser.execute_script("document.getElementById('prompt').value = arguments[0]", script)
        browser.execute_script(STOP_AT_THE_FIRST_TOKEN)
        page.click("#write")
        page.wait_for("#state", "Stopped.")
        text = text_of(page)
        browser.refresh()
        page.wait_for("#state", "Ready.")
        assert text
        eventually(lambda: gateway.metric("requests_total", pipeline="write", outcome="cancelled") == 1)


NPM = Path(__file__).parent / "npm"
TRICKY = ["48656c6c6f", "f0", "9f", "98", "80", "e280a8", "0d0a", "0a0a", "3a20", "c3a4c3b6", "646174613a20"]
"""In hexadecimal: a word, an emoji in four pieces, U+2028, CR LF, an empty line, a colon, umlauts, a field name."""


def test_the_npm_packages_read_the_same_events(client: httpx.Client, require: Require) -> None:
    folder = npm_environment("stream-readers", NPM, require)
    script = json.dumps({"outputs": 2 * len(TRICKY), "texts": TRICKY, "interval_s": 0.01})
    started = client.post("/v1/streams", json={"pipeline": "scripted_kept", "inputs": {"script": script}})
    assert started.status_code == 201, started.text
    url = str(client.base_url.join(started.headers["Location"]))
    answered = json.loads(output_of(["node", "read.mjs", url], folder))
    ours = checked(parsed(httpx.get(url).content.decode()))
    expected = [(str(event.id), event.name, event.data) for event in ours]
    for name, events in answered.items():
        assert [(id_, event, json.loads(data)) for id_, event, data in events] == expected, name
    assert "".join(event.data["text"] for event in ours[:-1]) == bytes.fromhex("".join(TRICKY * 2)).decode()
