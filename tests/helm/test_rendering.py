"""Every branch of every template, on every Kubernetes version, passes helm, the API's schemas and the cross checks."""

import re
import shutil
from pathlib import Path

import pytest

from tests.helm.cross_checks import faults
from tests.helm.rendering import CHART, KUBERNETES_VERSIONS, ChartRefused, combinations, helm, render, render_text
from tests.helm.schema_check import schema_faults

NEWEST = KUBERNETES_VERSIONS[-1]
every_combination = pytest.mark.parametrize(
    ("values", "kubernetes"), combinations(), ids=lambda each: each.stem if isinstance(each, Path) else each
)


@pytest.mark.parametrize(
    ("values", "kubernetes"),
    [
        pytest.param(*each, marks=() if each[1] == NEWEST else pytest.mark.full, id=f"{each[0].stem}-{each[1]}")
        for each in combinations()
    ],
)
def test_helm_lint_passes(values: Path, kubernetes: str) -> None:
    """The newest Kubernetes has deprecated the most."""
    said = helm("lint", "--strict", str(CHART), "--values", str(values), "--kube-version", kubernetes)
    assert "0 chart(s) failed" in said


@every_combination
def test_documents_match_the_schemas_of_kubernetes(values: Path, kubernetes: str) -> None:
    assert list(schema_faults(render(values, kubernetes=kubernetes), kubernetes)) == []


@every_combination
def test_cross_checks_find_no_faults(values: Path, kubernetes: str) -> None:
    assert faults(render(values, kubernetes=kubernetes)) == {}


@pytest.mark.parametrize("kubernetes", KUBERNETES_VERSIONS)
def test_the_defaults_pass_all_checks(kubernetes: str) -> None:
    documents = render(kubernetes=kubernetes)
    assert list(schema_faults(documents, kubernetes)) == []
    assert faults(documents) == {}


def test_an_older_kubernetes_is_rejected() -> None:
    with pytest.raises(ChartRefused, match="kubeVersion"):
        render(kubernetes="1.29")


def test_helm_package_leaves_out_ci(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.iterdir()
    shutil.unpack_archive(package, tmp_path / "unpacked")
    inside = {str(each.relative_to(tmp_path / "unpacked")) for each in (tmp_path / "unpacked").rglob("*")}
    assert "triton-gateway/files/rules.yaml" in inside
    assert not any("/ci" in each for each in inside)


def test_every_branch_is_taken_and_skipped(tmp_path: Path) -> None:
    """A comment behind each `if`, `else`, `with` and `range` tells which files of ci/ reach it."""
    chart, branches = _marked_copy(tmp_path)
    rendered = [render_text(values, kubernetes=version, chart=chart) for values, version in combinations()]
    seen = {branch: sum(f"# branch {branch} #" in text for text in rendered) for branch in branches}
    assert [branch for branch, times in seen.items() if times == 0] == [], "never taken"
    conditional = {branch for branch, action in branches.items() if action != "range"}
    assert [branch for branch in conditional if seen[branch] == len(rendered)] == [], "never skipped"


HAVE_TESTS_OF_THEIR_OWN = {"_refusals.tpl", "_kept.tpl"}
"""Their branches depend on refused values and on a cluster: test_values_schema.py and test_upgrade.py."""


def _marked_copy(folder: Path) -> tuple[Path, dict[str, str]]:
    """The chart with a comment behind every line that begins a branch, and the action of each by its name."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    branches: dict[str, str] = {}
    for path in [*chart.rglob("templates/**/*.yaml"), *chart.rglob("templates/**/*.tpl")]:
        if path.name not in HAVE_TESTS_OF_THEIR_OWN:
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(_marked(line, f"{path.name}:{n}", branches) for n, line in enumerate(lines, 1)))
    return chart, branches


def _marked(line: str, name: str, branches: dict[str, str]) -> str:
    action = re.fullmatch(r"\s*\{\{-? (if|else|with|range)\b.*\}\}\s*", line)
    if action is None:
        return line
    branches[name] = action[1]
    return f'{line.rstrip()}{{{{ "\\n# branch {name} #\\n" }}}}\n'
