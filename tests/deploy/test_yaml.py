"""yamllint reports nothing about the delivered YAML files."""

from pathlib import Path

import pytest
from yamllint import linter
from yamllint.config import YamlLintConfig

ROOT = Path(__file__).parents[2]
RULES = YamlLintConfig(
    "{extends: default, rules: {line-length: {max: 140}, document-start: disable, braces: disable,"
    " comments: {min-spaces-from-content: 1}, truthy: {check-keys: false}}}"
)
LONG = {"rules.yaml", "rules_test.yaml"}
"""These files may have long lines: a query on one line is easier to copy."""
FILES = [
    *ROOT.glob("deploy/**/*.yaml"),
    *(path for path in ROOT.glob("helm/**/*.yaml") if "templates" not in path.parts),
    ROOT / "gateway.yaml",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_yamllint_reports_nothing(path: Path) -> None:
    problems = [str(each) for each in linter.run(path.read_text(), RULES, str(path))]
    assert [each for each in problems if not (path.name in LONG and "line too long" in each)] == []
