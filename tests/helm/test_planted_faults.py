"""Faults planted into a copy of the chart, one at a time: which of the checks sees each."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.helm.cross_checks import faults
from tests.helm.rendering import CHART, ChartRefused, render
from tests.helm.schema_check import schema_faults

PLANTED = yaml.safe_load((Path(__file__).parent / "planted_faults.yaml").read_text())


@pytest.mark.parametrize("plan", PLANTED, ids=[each["fault"] for each in PLANTED])
def test_a_planted_fault_is_seen(plan: dict[str, str], tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    path = chart / "templates" / plan["template"]
    text = path.read_text()
    assert plan["there"] in text, "the chart has changed: plant the fault anew"
    path.write_text(text.replace(plan["there"], plan["planted"]))
    assert seen_by(chart, chart / "ci" / f"{plan['values']}-values.yaml") == set(plan["seen_by"])


def seen_by(chart: Path, values: Path) -> set[str]:
    """``helm``, ``schema`` and the names of the cross checks that find something."""
    try:
        documents = render(values, chart=chart)
    except ChartRefused:
        return {"helm"}
    refused = {"schema"} if list(schema_faults(documents, "1.33")) else set()
    return refused | set(faults(documents))
