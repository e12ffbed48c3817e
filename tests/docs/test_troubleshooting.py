"""Every message on the troubleshooting page exists in the code."""

import ast
import re
from functools import cache

import pytest

from app.api.error_table import ERROR_BY_CODE
from tests.docs.pages import ROOT, rows_under

PAGE = "docs/how-to/troubleshooting.md"
MESSAGES = [
    message
    for heading in ("At start", "In the log", "In an answer")
    for row in rows_under(PAGE, heading)
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


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_in_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("...") if part.strip()]
    assert message in ERROR_BY_CODE or any(all(part in text for part in parts) for text in texts())


def test_the_page_has_many_messages() -> None:
    assert len(MESSAGES) > 40
