"""The tests that SECURITY.md and the list of faults name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "SECURITY.md", ROOT / "tests" / "live" / "chaos" / "README.md"]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_test_exists(page: Path) -> None:
    named = NAMED.findall(page.read_text())
    assert len(named) > 20
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in source_of(page, file)] == []


def source_of(page: Path, file: str) -> str:
    folder = ROOT if file.startswith("tests/") else page.parent
    return (folder / file).read_text()
