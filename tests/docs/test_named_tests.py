"""The tests that SECURITY.md names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_named_test_exists() -> None:
    named = NAMED.findall((ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []
