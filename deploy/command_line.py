"""Writes docs/reference/command-line.md from the parser of ``triton-gateway``.

.venv/bin/python -m deploy.command_line
"""

import argparse
import textwrap
from collections.abc import Iterator

from app.cli import command_parser
from app.settings import Settings
from deploy.bootstrap import ROOT

PAGE = ROOT / "docs" / "reference" / "command-line.md"
INTRODUCTION = """# Command line

The commands of `triton-gateway`. `triton-gateway COMMAND --help` prints a command with its defaults, and
`triton-gateway --version` the version. `python -m deploy.command_line` writes this page from the parser.

`serve`, `models`, `triton` and `init` also read the [settings](settings.md) from `GATEWAY_*` variables; an option
overrides its variable. `check` and `key` read no settings.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | `check` found an error, or with `--strict` a warning; or the gateway failed unexpectedly |
| 2 | the command line, a setting, a file, a port or a server cannot be used; the message says which |
"""
SETTINGS = "Each [setting](settings.md) is an option: `GATEWAY_MAX_BODY_BYTES=1000000` is `--max-body-bytes 1000000`.\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """The text of the page."""
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
        names = ", ".join(names_of(each) for each in of_settings)
        parts += [SETTINGS, textwrap.fill(f"{names}.", 140, break_on_hyphens=False) + "\n"]
    if rows:
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n")
    examples = example_of(command)
    return "\n".join([*parts, examples] if examples else parts)


def arguments_of(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a command, without ``--help``."""
    return [each for each in command._actions if not isinstance(each, argparse._HelpAction)]


def row_of(argument: argparse.Action) -> str:
    text = (argument.help or "").replace("%%", "%").replace("|", "&#124;")
    return f"| {names_of(argument)} | {text} |"


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
