"""Plants one fault at a time into a copy of the chart; the expected checks must find it."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.helm.cross_checks import faults
from tests.helm.rendering import CHART, ChartRefused, render
from tests.helm.schema_check import schema_faults

PLANTED = yaml.safe_load((Path(__file__).parent / "planted_faults.yaml").read_text())


@pytest.mark.parametrize("plan", PLANTED, ids=[each["fault"] for each in PLANTED])
def test_the_expected_checks_find_a_planted_fault(plan: dict[str, str], tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    path = chart / "templates" / plan["template"]
    text = path.read_text()
    assert plan["original"] in text, "the template has changed: update planted_faults.yaml"
    path.write_text(text.replace(plan["original"], plan["replacement"]))
    assert found_by(chart, chart / "ci" / f"{plan['values']}-values.yaml") == set(plan["found_by"])


def found_by(chart: Path, values: Path) -> set[str]:
    """Returns the cross checks that find something, and ``helm`` or ``schema`` if these reject the chart."""
    try:
        documents = render(values, chart=chart)
    except ChartRefused:
        return {"helm"}
    refused = {"schema"} if list(schema_faults(documents, "1.33")) else set()
    return refused | set(faults(documents))
