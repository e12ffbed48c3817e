"""The reference pages match the code: generated tables, the command line, and the keys of gateway.yaml."""

import re
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from app.api.endpoint import READ_HEADERS
from app.api.explain.explanations import Explanations
from app.api.idempotency.idempotency_layer import Idempotency
from app.api.openapi import EXPOSED_HEADERS
from app.api.sessions.session_layer import Sessions
from app.cli import command_parser
from app.pipelines import llm_spec as spec_module
from app.pipelines import spec
from app.pipelines.spec import GatewaySpec
from app.sessions.session import SessionSpec
from app.settings import PREFIX, Settings
from deploy.reference import arguments_of, commands_of, default_text, pages
from tests.docs.pages import ROOT, rows_under

SECTIONS: dict[str, type[BaseModel]] = {
    "The file": GatewaySpec,
    "A pipeline": spec.PipelineSpec,
    "inputs": spec.InputSpec,
    "outputs": spec.OutputSpec,
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
    "openai": spec_module.OpenAISpec,
    "openai: completions": spec_module.CompletionsSpec,
    "openai: chat": spec_module.ChatSpec,
    "openai: embeddings": spec_module.EmbeddingsSpec,
    "openai: usage": spec_module.UsageSpec,
    "openai: logprobs": spec_module.LogprobsSpec,
    "openai: guided": spec_module.GuidedSpec,
}
"""The models of the file, by heading of docs/reference/gateway-yaml.md."""
PAGES_WITH_CHART_VALUES = (
    *("install-kubernetes.md", "upgrade-and-drain.md", "failures.md", "workers-and-memory.md", "existing-triton.md"),
    *("alerts.md", "keys.md", "scaling.md", "llm-backends.md"),
)


def keys_of(section: type[BaseModel]) -> list[tuple[str, str]]:
    return [(f"`{name}`", default_text(field)) for name, field in section.model_fields.items()]


@pytest.mark.parametrize("path", PAGES := pages(), ids=lambda path: path.name)
def test_generated_parts_of_the_page_are_current(path: Path) -> None:
    assert path.read_text() == PAGES[path], "run make reference"


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_of_gateway_yaml_is_documented_with_its_default(heading: str) -> None:
    assert [row[:2] for row in rows_under("docs/reference/gateway-yaml.md", heading)] == keys_of(SECTIONS[heading])


def test_every_section_of_gateway_yaml_has_its_table() -> None:
    found, waiting = set[type[BaseModel]](), [GatewaySpec]
    while waiting:
        section = waiting.pop()
        found.add(section)
        waiting += [inner for field in section.model_fields.values() for inner in sections_in(field.annotation)]
    assert found == set(SECTIONS.values())


def sections_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    holds_others = get_origin(annotation) in (dict, list, Union, types.UnionType)
    return [found for inner in get_args(annotation) for found in sections_in(inner)] if holds_others else []


def test_the_counterparts_of_nvidias_flags_are_settings() -> None:
    rows = rows_under("docs/how-to/migration.md", "From NVIDIA's OpenAI front end")
    named = re.findall(rf"`{PREFIX}(\w+)`", "\n".join(counterpart for _, counterpart in rows))
    assert len(named) > 5
    assert {name.lower() for name in named} <= set(Settings.model_fields)


def test_pages_name_only_metrics_that_exist() -> None:
    names = {row[0].strip("`") for row in rows_under("docs/reference/metrics.md", "Metrics")}
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
