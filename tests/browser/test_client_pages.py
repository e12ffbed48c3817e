"""The how-to pages of clients work as printed: the blocks of a page are one program with the printed output.

The gateway of these tests allows one request at a time, and the network drops each stream once.
"""

import contextlib
import io
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from selenium.webdriver import Chrome

from app.launcher.embedded_triton import EmbeddedTriton
from tests.browser.page import ConsolePage
from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.test_documented_commands import is_the_same
from tests.toolkit.processes import GatewayProcess, running_gateway
from tests.toolkit.proxy import DroppingNetwork, network_to

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
    folder = tmp_path_factory.mktemp("limited")
    pipelines = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]
    pipelines["write"]["limits"] = {"in_flight": 1, "queue": 0}
    (folder / "samples").symlink_to(ROOT / "samples")
    config = folder / "gateway.yaml"
    shown = {name: pipelines[name] for name in ("write", "ocr")}
    config.write_text(yaml.safe_dump({"pipelines": shown}, sort_keys=False))
    settings = {"triton_url": triton.grpc_url, "config": str(config), "cors_origins": "null", "drain_s": "1"}
    with running_gateway(folder, **settings) as gateway:
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


def test_the_javascript_page_works_as_printed_in_node(
    limited: tuple[GatewayProcess, DroppingNetwork], tmp_path: Path, require: Require
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


def test_the_javascript_page_works_as_printed_in_a_browser(
    limited: tuple[GatewayProcess, DroppingNetwork], tmp_path: Path, browser: Chrome
) -> None:
    gateway, network = limited
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
