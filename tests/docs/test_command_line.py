"""What the page of the command line shows of the parser."""

import argparse

from app.cli import command_parser
from deploy.reference import arguments_of, commands_of, section_of

COMMANDS = list(commands_of(command_parser()))


def test_every_command_is_on_the_page() -> None:
    assert {command.prog for command, _ in COMMANDS} == {
        f"triton-gateway {name}" for name in ("serve", "check", "init", "triton", "models", "key new")
    }


def test_every_command_and_argument_has_a_help_text() -> None:
    arguments = [(command.prog, each) for command, _ in COMMANDS for each in arguments_of(command)]
    assert len(arguments) > 40
    assert [(prog, each.dest) for prog, each in arguments if not each.help] == []
    assert [command.prog for command, text in COMMANDS if not text] == []


def test_an_option_is_a_row_with_its_choices() -> None:
    parser = argparse.ArgumentParser(prog="triton-gateway dance")
    parser.add_argument("--tempo", choices=["slow", "fast"], help="100 %% | more")
    assert section_of(parser, "dance alone").splitlines() == [
        "## triton-gateway dance",
        "",
        "Dance alone.",
        "",
        "| argument | meaning |",
        "|---|---|",
        "| `--tempo` (slow, fast) | 100 % &#124; more |",
    ]
