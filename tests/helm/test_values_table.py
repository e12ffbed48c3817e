"""The table of values in the chart's README matches values.yaml."""

import importlib.util
import sys
from types import ModuleType

import pytest
import yaml

from tests.helm.rendering import CHART, ROOT


@pytest.fixture(scope="module")
def values_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("values_table", ROOT / "helm" / "values_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def test_the_readme_matches_values_yaml(values_table: ModuleType) -> None:
    readme = (CHART / "README.md").read_text()
    table = values_table.table_of(values_table.rows_of((CHART / "values.yaml").read_text()))
    assert readme == values_table.with_table(readme, table), "run .venv/bin/python helm/values_table.py"


def test_every_value_is_described(values_table: ModuleType) -> None:
    rows = values_table.rows_of((CHART / "values.yaml").read_text())
    assert [row.key for row in rows if not row.description] == []
    assert len(rows) > len(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_a_comment_above_a_key_becomes_its_row(values_table: ModuleType) -> None:
    text = "# About all.\n\na:\n  # First\n  # of two.\n  b: 1\n# A | B.\nc: []\n"
    rows = values_table.rows_of(text)
    assert [(row.key, row.default, row.description) for row in rows] == [
        ("a.b", "`1`", "First of two."),
        ("c", "`[]`", "A | B."),
    ]
    assert "A &#124; B." in values_table.table_of(rows)


def test_a_readme_without_marks_is_an_error(values_table: ModuleType) -> None:
    with pytest.raises(ValueError, match="needs the marks"):
        values_table.with_table("# Nothing here", "")
