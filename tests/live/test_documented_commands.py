"""The commands and programs of the documentation and of the catalog work, and print the documented output."""

import doctest
import itertools
import json
import shutil
import subprocess
import sys

import httpx
import pytest
import yaml

from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.test_speech import SAMPLE_TEXT
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.programs import environment_without_proxies, output_of

PAGES = (
    "README.md",
    "docs/how-to/keys.md",
    "docs/reference/http.md",
    "docs/reference/errors.md",
    "docs/explanation/early-exit.md",
    "docs/tutorials/bls-to-steps.md",
    "docs/reference/metrics.md",
    "docs/reference/oip.md",
)
PYTHON_PAGES = ("docs/reference/openai.md", "docs/how-to/migration.md")
DOCUMENTED_ADDRESS = "127.0.0.1:8080"
SEPARATE_PACKAGE = "kserve"
"""tests/clients runs the programs with this package, in a separate environment."""


END = "(end of the program)"
RUN = f"""
import json, sys
for page, text in json.loads(sys.argv[1]):
    exec(compile(text, page, "exec"), {{"__name__": "__main__"}})
    print("{END}")
"""


def commands() -> list[tuple[str, str, str]]:
    """Returns (page, commands, documented output or an empty text) for each block of commands."""
    found = []
    for name in PAGES:
        blocks = [*blocks_of(ROOT / name), ("", "")]
        for (language, text), (next_language, next_text) in itertools.pairwise(blocks):
            if language == "sh" and "http://127.0.0.1:808" in text:
                found.append((name, text, next_text if next_language == "text" else ""))
    return found


def snippets() -> list[tuple[str, str]]:
    """Returns (page, Python program) for each program."""
    blocks = [(name, *block) for name in PYTHON_PAGES for block in blocks_of(ROOT / name)]
    return [(name, text) for name, language, text in blocks if language == "python" and SEPARATE_PACKAGE not in text]


def is_the_same(printed: str, answered: str) -> bool:
    """Compares texts, but ignores white space and the parts that the page replaces with ``...``."""
    expected, actual = ("".join(text.split()) for text in (printed, answered))
    return doctest.OutputChecker().check_output(expected, actual, doctest.ELLIPSIS)


@pytest.mark.parametrize(("page", "command", "answer"), commands(), ids=[each[0] for each in commands()])
def test_a_documented_command_prints_the_documented_answer(
    page: str, command: str, answer: str, gateway: GatewayProcess, require: Require
) -> None:
    require(shutil.which("curl"), "curl is not installed")
    command = command.replace("http://127.0.0.1:8080", gateway.url).replace("http://127.0.0.1:8081", gateway.admin_url)
    environment = environment_without_proxies() | {"API_KEY": "none"}
    shell = ["bash", "-euo", "pipefail", "-c", command]
    printed = output_of(shell, ROOT, environment=environment)
    assert printed
    if answer:
        assert is_the_same(answer, printed), f"{page} documents a different answer than {printed}"


def test_every_documented_program_runs(gateway: GatewayProcess) -> None:
    """One interpreter runs all programs, each with names of its own, because their imports take seconds."""
    address, programs = gateway.url.removeprefix("http://"), snippets()
    assert all(DOCUMENTED_ADDRESS in text for _, text in programs)
    adapted = [(page, text.replace(DOCUMENTED_ADDRESS, address)) for page, text in programs]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(adapted)],
        env=environment_without_proxies(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = [bool(text.strip()) for text in done.stdout.split(END)[:-1]]
    assert list(zip((page for page, _ in programs), printed, strict=True)) == [(page, True) for page, _ in programs]


PIPELINES: dict[str, dict[str, object]] = yaml.safe_load((ROOT / "gateway.yaml").read_text())["pipelines"]


def sample(client: httpx.Client, pipeline: str, language: str) -> str:
    text: str = client.get(f"/v1/pipelines/{pipeline}").json()["samples"][language]
    return text


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_curl_samples_of_a_pipeline_work(client: httpx.Client, require: Require, pipeline: str) -> None:
    require(shutil.which("curl"), "curl is not installed: `make system-packages` installs it")
    command = sample(client, pipeline, "curl").replace("curl ", "curl --silent --show-error --fail-with-body ")
    assert output_of(["sh", "-c", command], ROOT).startswith(
        "{" if pipeline != "listen" else f'{{"text":"{SAMPLE_TEXT}"'
    )
    if pipeline == "write":
        assert "event: done" in output_of(["sh", "-c", sample(client, pipeline, "curl_stream")], ROOT)


@pytest.mark.parametrize("pipeline", ["ocr", "embed", "write", "listen"])
def test_the_javascript_sample_works(client: httpx.Client, require: Require, pipeline: str) -> None:
    require(shutil.which("node"), "node is not installed: `make system-packages` installs it")
    answer = output_of(
        ["node", "--no-warnings", "--input-type=module"], ROOT, text=sample(client, pipeline, "javascript")
    )
    assert answer.startswith("{")
    assert "request_id" not in answer


def test_the_python_samples_work(client: httpx.Client) -> None:
    """One interpreter runs all samples, because it takes a second to import httpx."""
    programs = [sample(client, pipeline, "python") for pipeline in ("ocr", "embed", "write", "listen")]
    printed = output_of([sys.executable, "-c", "\n".join(programs)], ROOT).splitlines()
    assert [line[:1] for line in printed] == ["{", "{", "{", "{"]
