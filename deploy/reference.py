"""Writes what docs/reference/ repeats of the code: tables, severity and solution of findings, and the command line.

make reference
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

import app.process.gateway  # noqa: F401 - each layer adds its errors to the table
from app.api.error_table import ROW_BY_ERROR
from app.api.openai.requests import NEUTRAL_OF_EMBEDDINGS, NEUTRAL_OF_TEXTS
from app.api.sessions.open_sessions import metrics_of_sessions
from app.cli import command_parser
from app.coalescing.shared_calls import SharedCallMetrics
from app.core.errors import GatewayError
from app.lint.findings import Check, checks, known_faults
from app.observability.metrics import Metrics
from app.settings import PREFIX, Settings
from deploy.bootstrap import ROOT

FOLDER = ROOT / "docs" / "reference"
INTRODUCTION = """# Command line

The commands of `triton-gateway`. `triton-gateway COMMAND --help` prints a command with its defaults, and
`triton-gateway --version` the version. `make reference` writes this page from the parser.

`serve`, `models`, `triton` and `init` also read the [settings](settings.md) from `GATEWAY_*` variables; an option
overrides its variable. `check` and `key` read no settings.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | `check` found an error, or with `--strict` a warning; or the gateway failed unexpectedly |
| 2 | the command line, a setting, a file, a port or a server cannot be used; the message says which |
"""
SETTINGS = """Each [setting](settings.md) is an option: `GATEWAY_MAX_BODY_BYTES=1000000` is `--max-body-bytes 1000000`.
One that is true or false also has `--no-NAME`: `GATEWAY_DOCS=false` is `--no-docs`.
"""


Row = tuple[str, ...]


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Returns the current text of each page. Keeps the parts that are written by hand."""
    findings = (FOLDER / "checks.md").read_text()
    for code, check in checks().items():
        if code not in known_faults().faults:
            findings = with_finding(findings, code, check)
    metrics = Metrics("0")
    SharedCallMetrics(metrics.counter, metrics.histogram)
    metrics_of_sessions(metrics)
    tables: dict[str, tuple[str, Iterable[Row]]] = {
        "settings.md": ("Settings", rows_of_settings()),
        "errors.md": (
            "Codes",
            sorted(map(row_of_error, ROW_BY_ERROR), key=lambda row: row[0].split()[0]),
        ),
        "metrics.md": ("Metrics", rows_of_metrics(metrics)),
        "openai.md": ("Fields without an effect", rows_of_neutral_fields()),
    }
    written = {name: with_table((FOLDER / name).read_text(), *table) for name, table in tables.items()}
    written |= {
        "checks.md": findings,
        "command-line.md": commands(),
        "known-faults.md": with_faults((FOLDER / "known-faults.md").read_text()),
    }
    return {FOLDER / name: text for name, text in written.items()}


def with_table(page: str, heading: str, rows: Iterable[Row]) -> str:
    """Replaces the rows of the first table under a heading."""
    head, section = re.split(rf"(?<=\n## {re.escape(heading)}\n)", page, maxsplit=1)
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return head + re.sub(r"(\|.*\n\|[-|]+\|\n)(?:\|.*\n)*", lambda found: found[1] + lines, section, count=1)


def with_finding(page: str, code: str, check: Check) -> str:
    """Replaces severity and solution in the section of a finding. Raises ValueError if there is no such section."""
    head, section = re.split(rf"(?<=\n## {code}\n)", page, maxsplit=1)
    section = f"`{check.severity}`: {re.sub(r'^`[a-z]+`: ', '', section)}"
    return head + re.sub(r"(?m)^\*\*Solution\*\*: .*$", lambda _: f"**Solution**: {check.solution}", section, count=1)


def with_faults(page: str) -> str:
    """Replaces the sections of the known faults, all behind the first heading."""
    sections = [page.partition("\n## ")[0]]
    for code, fault in known_faults().faults.items():
        links = [
            f"[{each}](https://github.com/triton-inference-server/{each.replace('#', '/issues/')})"
            for each in fault.reports
        ]
        fixed = f"fixed in {fault.fixed}" if fault.fixed else "not fixed"
        lines = [
            f"## {code}\n`{fault.severity}`, {', '.join(links)}, {fixed}: {fault.dated}.",
            f"{fault.seen}.",
            f"**Solution**: {fault.solution or 'Another release.'}",
            f"**Kept from it here**: {fault.kept}" * bool(fault.kept),
            f"**Here**: {fault.helps}" * bool(fault.helps),
        ]
        sections.append("\n\n".join(filter(None, lines)))
    return "\n\n".join(map(str.strip, sections)) + "\n"


def rows_of_settings() -> Iterator[Row]:
    for name, field in Settings.model_fields.items():
        default = default_text(field)
        yield f"`{PREFIX}{name.upper()}`{default and f' ({default})'}", field.description or ""


def default_text(field: FieldInfo) -> str:
    """Empty: the value is not set, or depends on others."""
    default = field.default
    if field.is_required():
        return "required"
    if field.default_factory or default is None or default in ("", (), [], {}):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def row_of_error(error: type[GatewayError]) -> Row:
    row = ROW_BY_ERROR[error]
    outcome = "" if error.outcome == "client_error" else f" (`{error.outcome}`)"
    return f"{row.status} `{error.code}`{outcome}", row.meaning


def rows_of_metrics(metrics: Metrics) -> Iterator[Row]:
    """Only the collector itself has the labels of a metric without samples."""
    for collector in metrics.registry._collector_to_names:
        labels = ", ".join(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            if family.name.startswith("process_"):  # as of every program with prometheus-client
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert family.type == type_of(name), f"docs/reference/metrics.md gives the wrong type for {name}"
            yield f"`{name}{{{labels}}}`" if labels else f"`{name}`", family.documentation.rstrip(".")


def type_of(metric: str) -> str:
    """The type of a metric by its name, as the page explains it."""
    if metric.endswith("_total"):
        return "counter"
    return "histogram" if metric.endswith(("_seconds", "_items_per_call")) else "gauge"


def rows_of_neutral_fields() -> Iterator[Row]:
    """Fields with the same values are one row."""
    names: dict[Row, list[str]] = {}
    for name, neutral in NEUTRAL_OF_TEXTS.items():
        names.setdefault((neutral.meaning, "yes" if name in NEUTRAL_OF_EMBEDDINGS else ""), []).append(f"`{name}`")
    for (meaning, is_of_embeddings), alike in names.items():
        yield ", ".join(alike), meaning, is_of_embeddings


def commands() -> str:
    """The page of the command line."""
    parser = command_parser()
    sections = [section_of(command, text) for command, text in commands_of(parser)]
    return "\n".join([INTRODUCTION, example_of(parser), *sections])


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yields each command that has a help text, with this text."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for shown in action._choices_actions:
                command = action.choices[shown.dest]
                inner = list(commands_of(command))
                yield from inner or [(command, shown.help or "")]


def section_of(command: argparse.ArgumentParser, text: str) -> str:
    """The heading of a command, its description and its arguments."""
    arguments = arguments_of(command)
    of_settings = [each for each in arguments if each.dest in Settings.model_fields]
    is_long = len(of_settings) > 10
    rows = [row_of(each) for each in arguments if not (is_long and each in of_settings)]
    parts = [f"## {command.prog}\n", f"{text[0].upper()}{text[1:]}.\n"]
    if is_long:
        aliases = [names_of(each) for each in of_settings if len(each.option_strings) > 1]
        parts += [SETTINGS, f"Other names: {', '.join(aliases)}.\n"]
    if rows:
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n")
    examples = example_of(command)
    return "\n".join([*parts, examples] if examples else parts)


def arguments_of(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a command, without ``--help`` and hidden ones."""
    return [each for each in command._actions if argparse.SUPPRESS not in (each.default, each.help)]


def row_of(argument: argparse.Action) -> str:
    return f"| {names_of(argument)} | {argument.help or ''} |"


def names_of(argument: argparse.Action) -> str:
    """The name of a positional argument, or all names of an option, and its choices."""
    shown = " or ".join(f"`{name}`" for name in argument.option_strings or [argument.metavar])
    return f"{shown} ({', '.join(argument.choices)})" if argument.choices else shown


def example_of(command: argparse.ArgumentParser) -> str:
    _, _, examples = (command.epilog or "").partition("examples:\n")
    lines = "\n".join(line.removeprefix("  ") for line in examples.splitlines())
    return f"```text\n{lines}\n```\n" if lines else ""


if __name__ == "__main__":
    main()
