"""The commands and programs that the documentation prints work as printed, and answer what it says they answer."""

import doctest
import itertools
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.live.conftest import GatewayProcess

PAGES = (
    "README.md",
    "docs/how-to/curl.md",
    "docs/how-to/keys.md",
    "docs/reference/http.md",
    "docs/reference/errors.md",
    "docs/explanation/early-exit.md",
    "docs/reference/metrics.md",
    "docs/reference/oip.md",
)
PYTHON_PAGES = ("docs/reference/openai.md", "docs/how-to/migration.md")
HERE = "127.0.0.1:8080"
ELSEWHERE = "kserve"
"""A package that tests/clients has in an environment of its own."""


def commands() -> list[tuple[str, str, str]]:
    """(page, commands, what they print, or nothing where the page does not say)."""
    found = []
    for name in PAGES:
        blocks = [*blocks_of(ROOT / name), ("", "")]
        for (language, text), (next_language, next_text) in itertools.pairwise(blocks):
            if language == "sh" and "http://127.0.0.1:808" in text:
                found.append((name, text, next_text if next_language == "text" else ""))
    return found


def snippets() -> list[tuple[str, str]]:
    """(page, a program in Python)."""
    blocks = [(name, *block) for name in PYTHON_PAGES for block in blocks_of(ROOT / name)]
    return [(name, text) for name, language, text in blocks if language == "python" and ELSEWHERE not in text]


def is_the_same(printed: str, answered: str) -> bool:
    """Compares texts except for white space and parts that the page omits with ``...``."""
    wanted, got = ("".join(text.split()) for text in (printed, answered))
    return doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS)


def direct() -> dict[str, str]:
    """The environment without proxies."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


@pytest.mark.parametrize(("page", "command", "answer"), commands(), ids=[each[0] for each in commands()])
def test_a_printed_command_has_the_printed_answer(
    page: str, command: str, answer: str, gateway: GatewayProcess, require: Require
) -> None:
    require(shutil.which("curl"), "there is no curl")
    there = command.replace("http://127.0.0.1:8080", gateway.url).replace("http://127.0.0.1:8081", gateway.admin_url)
    environment = direct() | {"API_KEY": "none"}
    shell = ["bash", "-euo", "pipefail", "-c", there]
    done = subprocess.run(shell, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if answer:
        assert is_the_same(answer, done.stdout), f"{page} says otherwise: {done.stdout}"


@pytest.mark.parametrize(("page", "snippet"), snippets(), ids=[each[0] for each in snippets()])
def test_a_printed_program_runs(page: str, snippet: str, gateway: GatewayProcess) -> None:
    assert HERE in snippet
    there = snippet.replace(HERE, gateway.url.removeprefix("http://"))
    program = [sys.executable, "-c", there]
    done = subprocess.run(program, env=direct(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
