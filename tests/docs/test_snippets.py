"""Every code block of the documentation is run by a test, or has a fence that marks it as output or as a fragment.

A test must run every block whose fence has a language in ``LANGUAGES``. Commands that no test can run, such as
commands for a cluster, have a fence without a language; output has ``text``.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator
from pydantic import TypeAdapter

from app.admission.keys import read_keys
from app.cli import main
from app.pipelines import spec
from app.pipelines.file import read_gateway_file
from app.routes import DIALECTS
from tests.docs.pages import ALL_PAGES, ROOT, blocks_of
from tests.live.test_documented_commands import commands, snippets

LANGUAGES = {"sh", "python", "js", "html", "yaml", "nginx"}
RUN_BY = {
    ("README.md", "sh"): "tests/docs/test_tutorials.py",
    ("app/starter/README.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/explanation/early-exit.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/how-to/javascript.md", "js"): "tests/browser/test_client_pages.py",
    ("docs/how-to/keys.md", "sh"): "tests/docs/test_snippets.py",
    ("docs/how-to/migration.md", "python"): "tests/clients/test_reference_models.py",
    ("docs/how-to/proxies.md", "nginx"): "tests/toolkit/nginx.py",
    ("docs/how-to/python-client.md", "python"): "tests/browser/test_client_pages.py",
    ("docs/how-to/sessions.md", "sh"): "tests/live/test_sessions.py",
    ("docs/how-to/standalone-triton.md", "sh"): "tests/live/test_starter.py",
    ("docs/how-to/own-server.md", "js"): "tests/typescript/test_client.py",
    ("docs/reference/websocket.md", "python"): "tests/live/test_sockets.py",
    ("docs/tutorials/llm-in-a-browser.md", "js"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/llm-of-your-triton.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/llm-of-your-triton.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/speak-to-your-triton.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/speak-to-your-triton.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/own-ensemble.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/reference/model-kit.md", "python"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/own-ensemble.md", "sh"): "tests/docs/test_tutorials.py",
    ("docs/tutorials/own-ensemble.md", "yaml"): "tests/docs/test_tutorials.py",
}
"""The test that runs the blocks of a page, by page and language. Blocks that a test of all pages runs are left out."""

Block = tuple[str, str, str]


@cache
def blocks() -> list[Block]:
    """Returns (page, language, text) of every block that a test must run."""
    found = [(str(page.relative_to(ROOT)), *block) for page in ALL_PAGES for block in blocks_of(page)]
    return [block for block in found if block[1] in LANGUAGES]


def yaml_blocks() -> list[Block]:
    return [block for block in blocks() if block[1] == "yaml" and (block[0], "yaml") not in RUN_BY]


def is_run(block: Block) -> bool:
    page, language, text = block
    by_all = {(name, command) for name, command, _ in commands()} | set(snippets())
    return (page, text) in by_all or (page, language) in RUN_BY or block in yaml_blocks()


def test_every_block_is_run_by_a_test() -> None:
    assert len(blocks()) > 30
    assert [(page, text) for page, language, text in blocks() if not is_run((page, language, text))] == []


@pytest.mark.parametrize(("page", "language"), RUN_BY)
def test_the_named_test_reads_the_page(page: str, language: str) -> None:
    assert [block for block in blocks() if block[:2] == (page, language)], "the page has no such block"
    assert Path(page).name in (ROOT / RUN_BY[page, language]).read_text()


def is_gateway_yaml(text: str, folder: Path) -> None:
    (folder / "gateway.yaml").write_text(text)
    assert read_gateway_file(folder / "gateway.yaml")


def is_keys_file(text: str, folder: Path) -> None:
    (folder / "keys.yaml").write_text(text)
    assert read_keys(folder / "keys.yaml", DIALECTS)


def is_contract(text: str, _: Path) -> None:
    contract = yaml.safe_load(text)["contract"]
    assert TypeAdapter(dict[str, spec.ContractSpec]).validate_python(contract)


def is_chart_values(text: str, _: Path) -> None:
    schema = yaml.safe_load((ROOT / "helm" / "triton-gateway" / "values.schema.json").read_text())
    assert list(Draft7Validator(schema).iter_errors(yaml.safe_load(text))) == []


CHECK_BY_KEY: dict[str, Callable[[str, Path], None]] = {
    "pipelines": is_gateway_yaml,
    "keys": is_keys_file,
    "contract": is_contract,
    **dict.fromkeys(("autoscaling", "gateway", "podMonitor", "sessionAffinity", "triton"), is_chart_values),
}
"""The check of a block of YAML, by its first key."""


@pytest.mark.parametrize("block", yaml_blocks(), ids=lambda block: block[0])
def test_a_block_of_yaml_is_valid(block: Block, tmp_path: Path) -> None:
    CHECK_BY_KEY[next(iter(yaml.safe_load(block[2])))](block[2], tmp_path)


def test_the_command_that_makes_a_key_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first command of keys.md prints a key and its entry for the keys file."""
    (command, *_) = [text for page, language, text in blocks() if page.endswith("keys.md") and language == "sh"]
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("tgw_")
    is_keys_file("keys:\n" + printed.err.removeprefix("keys:\n"), tmp_path)
