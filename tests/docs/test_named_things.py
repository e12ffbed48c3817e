"""The pages name what exists: links, tests, versions of clients, messages, measured figures.

The reference matches the code: generated tables, the command line, and the keys of gateway.yaml. The site that
``make docs`` builds, once for all tests, needs no other files.
"""

import ast
import json
import re
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin
from urllib.parse import unquote

import pytest
import yaml
from pydantic import BaseModel

from app.api.endpoint import READ_HEADERS
from app.api.error_table import ERROR_BY_CODE
from app.api.explain.explanations import Explanations
from app.api.idempotency.idempotency_layer import Idempotency
from app.api.openapi import EXPOSED_HEADERS
from app.api.sessions.session_layer import Sessions
from app.cli import command_parser
from app.pipelines import llm_spec, spec
from app.sessions.session import SessionSpec
from app.settings import PREFIX, Settings
from app.steps import steps_spec
from deploy.bootstrap import CACHE
from deploy.documentation import build, links_of, reachable
from deploy.reference import arguments_of, commands_of, default_text, pages
from tests.conftest import Require
from tests.docs.pages import ALL_PAGES, ROOT, Row, rows_under
from tests.toolkit.environments import locked_environment, once_in

HEADINGS_IN_TWO_CLICKS = {
    "how-to/install.md#with-pip": "install",
    "how-to/install.md#compose": "compose",
    "reference/command-line.md#command-line": "command line",
    "reference/models.md#kinds-of-models": "vLLM",
    "how-to/react.md#react-and-typescript": "React",
    "../CHANGELOG.md#changelog": "release notes",
    "how-to/install.md#change-the-port": "changing the port",
    "how-to/scaling.md#what-limits-a-pod": "sizing",
    "how-to/alerts.md#alerts": "alerts",
    "how-to/keys.md#api-keys": "keys",
    "how-to/troubleshooting.md#in-an-answer": "an error by its message",
}
"""Where a reader of the index must arrive with at most two links, and what the reader looks for."""


def slug_of(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text.strip()).replace(" ", "-")


@cache
def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    return {slug_of(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def is_broken(page: Path, link: str) -> bool:
    address, _, anchor = link.partition("#")
    target = page.parent / address if address else page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in anchors_of(target.resolve())


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_points_to_a_file_and_a_heading(page: Path) -> None:
    assert [link for link in links_of(page) if "://" not in link and is_broken(page, link)] == []


@pytest.mark.parametrize("heading", HEADINGS_IN_TWO_CLICKS, ids=HEADINGS_IN_TWO_CLICKS.get)
def test_a_heading_is_two_clicks_from_the_index(heading: str) -> None:
    first = targets_of(ROOT / "docs" / "README.md")
    page, _, anchor = heading.partition("#")
    target = ((ROOT / "docs" / page).resolve(), anchor)
    assert target in first.union(*(targets_of(page) for page, _ in first if page.suffix == ".md"))


def targets_of(page: Path) -> set[tuple[Path, str]]:
    """Returns the file and the heading of each link; without an anchor, the first heading of the file."""
    found = set()
    for link in links_of(page):
        address, _, anchor = link.partition("#")
        target = (page.parent / address).resolve() if address else page
        if "://" not in link and target.suffix == ".md":
            found.add((target, anchor or first_heading_of(target)))
    return found


@cache
def first_heading_of(page: Path) -> str:
    return slug_of(page.read_text().partition("\n")[0].lstrip("# "))


def test_one_of_two_indices_links_each_page_once() -> None:
    """README.md is for users, contributors.md for contributors. benchmarks/README.md links the pages of benchmarks."""
    docs = ROOT / "docs"
    links = links_of(docs / "README.md") + links_of(docs / "contributors.md")
    linked = [link for link in links if not link.startswith(("#", ".."))]
    indexed = [page for page in docs.rglob("*.md") if page.parent.name != "benchmarks"]
    assert len(linked) == len(set(linked))
    pages = {str(page.relative_to(docs)) for page in indexed} - {"README.md"}
    assert set(linked) == pages | {"benchmarks/README.md"}


def built_site(require: Require) -> Path:
    """The build ends with an error if a link to a page, or its anchor, is broken."""
    try:
        locked_environment("docs", require)
    except SystemExit as stopped:
        require(None, f"the generator of the site cannot be installed here: {stopped}")
    return once_in(CACHE / "docs-site", build)


ADDRESS = re.compile(r'<(a|script|img|iframe|source|object|link)\b[^>]*\b(?:src|srcset|data|href)="([^"#]+)')
"""Of a file that a browser loads, or of a link."""


def test_the_site_needs_no_other_files_and_its_search_has_every_page(require: Require) -> None:
    """Examples in HTML, which are no pages of the site, and the page for unknown addresses are left out."""
    site = built_site(require)
    html = [page for page in site.rglob("*.html") if page.name != "404.html"]
    pages = [page for page in html if not (ROOT / "docs" / page.relative_to(site)).exists()]
    named = [(page, *found) for page in pages for found in ADDRESS.findall(page.read_text())]
    own = [(page, address) for page, element, address in named if element != "a" or "://" not in address]
    assert len(own) > 5_000
    assert [(page, address) for page, address in own if not (page.parent / unquote(address)).is_file()] == []
    found = {item["location"].partition("#")[0] for item in json.loads((site / "search.json").read_text())["items"]}
    assert found >= {str(page.relative_to(site)) for page in pages}


def test_every_page_of_docs_is_reachable_from_the_readme() -> None:
    assert {*(ROOT / "docs").rglob("*.md")} - reachable(ROOT / "README.md") == set()


NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_named_test_exists() -> None:
    named = NAMED.findall((ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


LOCKS = {"kserve": "kserve", "litellm": "litellm", "langchain-openai": "langchain", "pydantic-ai-slim": "pydantic-ai"}
"""Lock file in requirements/ by package; all other packages are in dev.txt."""
NPM_LOCK = ROOT / "tests" / "clients" / "npm_llm" / "package-lock.json"
CLIENTS = rows_under("docs/how-to/migration.md", "Clients")


def locked_version(client: str) -> str:
    if "JavaScript" in client:
        version: str = json.loads(NPM_LOCK.read_text())["packages"]["node_modules/openai"]["version"]
        return version
    package = client.split("`")[1].split(".", maxsplit=1)[0]
    lock = (ROOT / "requirements" / f"{LOCKS.get(package, 'dev')}.txt").read_text()
    return re.findall(rf"^{package}==(\S+)", lock, re.M)[0]


@pytest.mark.parametrize("row", CLIENTS, ids=[row[0] for row in CLIENTS])
def test_each_client_has_its_locked_version_and_its_test(row: Row) -> None:
    client, version, _called, test = row
    assert version == locked_version(client)
    path = ROOT / test.split("`")[1]
    assert path.exists()
    assert ("(full)" in test) == ("pytestmark = pytest.mark.full" in path.read_text())


MESSAGES = [
    message
    for heading in ("At start", "In the log", "In an answer")
    for row in rows_under("docs/how-to/troubleshooting.md", heading)
    for message in re.findall(r"`([^`]+)`", row[0])
]


@cache
def texts() -> tuple[str, ...]:
    """Returns every string of the gateway's code, with ``...`` for the variable parts."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "app").rglob("*.py")]
    return tuple(text for tree in trees for node in ast.walk(tree) if (text := text_of(node)))


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "..." for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_the_messages_on_the_page_are_in_the_code() -> None:
    assert len(MESSAGES) > 40
    parts_of = {each: [part.strip() for part in each.split("...") if part.strip()] for each in MESSAGES}
    known = [each for each, parts in parts_of.items() if any(all(part in text for part in parts) for text in texts())]
    assert set(MESSAGES) - set(known) - ERROR_BY_CODE.keys() == set()


BENCHMARKS = ROOT / "docs" / "benchmarks"
FIGURE_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
BENCHMARK_LINK = re.compile(r"benchmarks/([A-Za-z0-9-]+\.md)")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"(?:(?:ms|µs|times|requests/s|KiB)\b|%)"
FIGURE = re.compile(rf"(?<![\w.,-])({NUMBER})(?=(?:(?: (?:to|and|or|instead of)|,) {NUMBER})? ?{UNIT})")
"""A number with a unit, and the first of two numbers that share a unit."""
COLUMN = re.compile(r"requests/s|, ms\b|, µs\b")
"""The head of a column whose cells are figures without a unit."""
CALCULATED = re.compile(r"at most|an estimate")
"""A line that says that it calculates its figures."""


def sections_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yields the heading and the text of each section that links a benchmark page, without blocks of code."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for section in re.split(r"(?m)^(?=## )", text):
        if BENCHMARK_LINK.search(section):
            yield section.splitlines()[0], section


def figures_of(section: str) -> list[str]:
    lines = [line for line in section.splitlines() if not CALCULATED.search(line)]
    return [figure for line in [*lines, *cells_of(section)] for figure in FIGURE.findall(line)]


def cells_of(section: str) -> Iterator[str]:
    """Yields the cells of the columns that have a unit in their head, each number with a unit."""
    for table in re.findall(r"(?m)^\|.*\n\|[-| ]+\|\n(?:\|.*(?:\n|\Z))+", section):
        head, _, *rows = [line.strip("|").split("|") for line in table.splitlines()]
        for place in (place for place, name in enumerate(head) if COLUMN.search(name)):
            yield from (re.sub(rf"({NUMBER})", r"\1 requests/s", row[place]) for row in rows)


def is_measured(figure: str, measured: frozenset[float]) -> bool:
    """Whether a measured number has this value after rounding, or a thousand times this value: µs given as ms."""
    digits = len(figure.partition(".")[2])
    value = float(figure.replace(",", ""))
    step = (
        10.0**-digits
        if digits
        else 10.0 ** (len(figure) - len(figure.replace(",", "").rstrip("0")) - figure.count(","))
    )
    return any(abs(each / unit - value) <= step / 2 for each in measured for unit in (1, 1000))


@pytest.mark.parametrize("page", FIGURE_PAGES, ids=lambda page: page.stem)
def test_a_figure_is_on_the_page_that_its_section_links(page: Path) -> None:
    for heading, section in sections_of(page):
        pages = "\n".join((BENCHMARKS / name).read_text() for name in set(BENCHMARK_LINK.findall(section)))
        measured = frozenset(float(each.replace(",", "")) for each in re.findall(NUMBER, pages))
        missing = [figure for figure in figures_of(section) if not is_measured(figure, measured)]
        assert missing == [], f"{page.name}, {heading}"


SECTIONS: dict[str, type[BaseModel]] = {
    "The file": spec.GatewaySpec,
    "A pipeline": spec.PipelineSpec,
    "inputs": spec.InputSpec,
    "outputs": spec.OutputSpec,
    "steps": steps_spec.StepSpec,
    "steps: inputs": steps_spec.ChosenSource,
    "steps: when": steps_spec.Condition,
    "parameters": spec.ParameterSpec,
    "stream": spec.StreamSpec,
    "batch": spec.BatchSpec,
    "limits": spec.LimitsSpec,
    "coalesce": spec.CoalesceSpec,
    "session": SessionSpec,
    "early_exit": spec.EarlyExitRule,
    "early_exit: error": spec.ErrorMatch,
    "refusals": spec.RefusalRule,
    "contract": spec.ContractSpec,
    "cancel": spec.CancelSpec,
    "oip": spec.OipSpec,
    "openai": llm_spec.OpenAISpec,
    "openai: completions": llm_spec.CompletionsSpec,
    "openai: chat": llm_spec.ChatSpec,
    "openai: embeddings": llm_spec.EmbeddingsSpec,
    "openai: usage": llm_spec.UsageSpec,
    "openai: logprobs": llm_spec.LogprobsSpec,
    "openai: guided": llm_spec.GuidedSpec,
}
"""The models of the file, by heading of docs/reference/gateway-yaml.md."""
PAGES_WITH_CHART_VALUES = (
    *("install-kubernetes.md", "upgrade-and-drain.md", "failures.md", "workers-and-memory.md", "existing-triton.md"),
    *("alerts.md", "keys.md", "scaling.md", "llm-backends.md"),
)


def keys_of(section: type[BaseModel]) -> list[str]:
    """Each key as on the page, with its default in brackets."""
    fields = [(field.alias or name, default_text(field)) for name, field in section.model_fields.items()]
    return [f"`{key}` ({default})" if default else f"`{key}`" for key, default in fields]


@pytest.mark.parametrize("path", PAGES := pages(), ids=lambda path: path.name)
def test_generated_parts_of_the_page_are_current(path: Path) -> None:
    assert path.read_text() == PAGES[path], "run make reference"


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_of_gateway_yaml_is_documented_with_its_default(heading: str) -> None:
    assert [row[0] for row in rows_under("docs/reference/gateway-yaml.md", heading)] == keys_of(SECTIONS[heading])


def test_every_section_of_gateway_yaml_has_its_table() -> None:
    found, waiting = set[type[BaseModel]](), [spec.GatewaySpec]
    while waiting:
        if (section := waiting.pop()) in found:
            continue
        found.add(section)
        waiting += [inner for field in section.model_fields.values() for inner in sections_in(field.annotation)]
    assert found == set(SECTIONS.values())


def sections_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    holds_others = get_origin(annotation) in (Annotated, dict, list, Union, types.UnionType)
    return [found for inner in get_args(annotation) for found in sections_in(inner)] if holds_others else []


def test_the_counterparts_of_nvidias_flags_are_settings() -> None:
    rows = rows_under("docs/how-to/migration.md", "From NVIDIA's OpenAI front end")
    named = re.findall(rf"`{PREFIX}(\w+)`", "\n".join(counterpart for _, counterpart in rows))
    assert len(named) > 5
    assert {name.lower() for name in named} <= set(Settings.model_fields)


def test_pages_name_only_metrics_that_exist() -> None:
    names = {row[0].strip("`").partition("{")[0] for row in rows_under("docs/reference/metrics.md", "Metrics")}
    bases = names | {f"{name}_{part}" for name in names for part in ("bucket", "sum", "count")}
    for page in (
        "README.md",
        "docs/reference/metrics.md",
        "docs/reference/http.md",
        "docs/explanation/early-exit.md",
        "docs/reference/errors.md",
    ):
        text = (ROOT / page).read_text()
        assert set(re.findall(r"\btriton_gateway_\w+", text)) <= bases, page


def test_chart_values_on_the_pages_for_operators_exist() -> None:
    values = yaml.safe_load((ROOT / "helm" / "triton-gateway" / "values.yaml").read_text())
    pages = [(ROOT / "docs" / "how-to" / name).read_text() for name in PAGES_WITH_CHART_VALUES]
    found = re.findall(rf"`((?:{'|'.join(values)})(?:\.\w+)+)(?:: [^`]*)?`", "\n".join(pages))
    named = set(found) - {"config.pbtxt", "gateway.yaml"}
    assert len(named) > 20
    assert [name for name in named if not has_value(values, name.split("."))] == []


def has_value(values: Any, path: list[str]) -> bool:
    """An empty mapping accepts every path, because Kubernetes defines its keys."""
    if not path or values == {}:
        return True
    return isinstance(values, dict) and path[0] in values and has_value(values[path[0]], path[1:])


COMMANDS = list(commands_of(command_parser()))


def test_every_command_is_on_the_page_and_has_a_help_text_like_its_arguments() -> None:
    assert {command.prog for command, _ in COMMANDS} == {
        f"triton-gateway {name}" for name in ("serve", "check", "init", "triton", "models", "key new")
    }
    arguments = [(command.prog, each) for command, _ in COMMANDS for each in arguments_of(command)]
    assert len(arguments) > 40
    assert [(prog, each.dest) for prog, each in arguments if not each.help] == []
    assert [command.prog for command, text in COMMANDS if not text] == []


def test_the_tables_of_headers_are_those_that_pages_of_a_browser_may_use() -> None:
    layers = (Idempotency, Explanations, Sessions)
    text = (ROOT / "docs/reference/http.md").read_text().partition("## Headers")[2]
    _, requests, answers = text.split("|---|---|", 2)
    read, exposed = ({*READ_HEADERS} - {"Content-Type"}, {*EXPOSED_HEADERS} - {"X-Should-Retry"})
    assert _names_in(requests.partition("| answer |")[0]) == read.union(*(layer.headers for layer in layers))
    assert _names_in(answers.partition("\n\n")[0]) == exposed.union(*(layer.answer_headers for layer in layers))


def _names_in(table: str) -> set[str]:
    """The names of headers in the first column."""
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    return {name for cell in cells for name in re.findall(r"`([A-Za-z-]+)", cell)}
