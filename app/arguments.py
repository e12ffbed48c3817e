"""The command-line parser, which suggests the nearest command or option for a mistyped one."""

import argparse
import re
from typing import Any, NoReturn

from app.domain.nearest import nearest, nearest_of

HIDDEN = {"worker"}
"""Commands that only the gateway itself calls."""

_INVALID_CHOICE = re.compile(r"argument COMMAND: invalid choice: '([^']*)'")


class CommandParser(argparse.ArgumentParser):
    """The parser of the command line and of each command."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        namespace, unknown = super().parse_known_args(*given, **named)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._nearest_option(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        if found := _INVALID_CHOICE.match(message):
            message = f"there is no command '{found[1]}'{nearest(found[1], self._commands())}"
        super().error(message)

    def _nearest_option(self, unknown: list[str]) -> str:
        options = [option for action in self._actions for option in action.option_strings]
        for word in unknown:
            if word.startswith("--") and (found := nearest_of(word.partition("=")[0], options)):
                return f"; did you mean '{found}'?"
        return ""

    def _commands(self) -> list[str]:
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [name for action in actions for name in action.choices if name not in HIDDEN]
