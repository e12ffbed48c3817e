"""Each branch of each template passes helm, Kubernetes' schemas and the cross checks, which find planted faults.

checkov's policies have accepted findings only, also for the Dockerfile. Each value is described, Helm and Artifact Hub
can read the metadata, and the notes are about the values.
"""

import base64
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Require
from tests.helm.checks import SCHEMAS, faults, schema_faults
from tests.helm.rendering import (
    CHART,
    CI_FILES,
    KUBERNETES_VERSIONS,
    NAMESPACE,
    RELEASE,
    ROOT,
    ChartRefused,
    Document,
    combinations,
    helm,
    render,
    render_text,
    the,
    the_gateway,
)
from tests.toolkit.environments import locked_environment, npm_environment
from tests.toolkit.programs import output_of

NEWEST = KUBERNETES_VERSIONS[-1]


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


@pytest.mark.parametrize(
    ("values", "kubernetes"),
    [*combinations(), *((None, version) for version in KUBERNETES_VERSIONS)],
    ids=lambda each: each.stem if isinstance(each, Path) else str(each),
)
def test_schemas_of_kubernetes_and_cross_checks_find_no_fault(values: Path | None, kubernetes: str) -> None:
    documents = render(values, kubernetes=kubernetes)
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
"""Their branches depend on refused values and on a cluster: test_values_schema.py and test_release.py."""


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


METADATA = yaml.safe_load((CHART / "Chart.yaml").read_text())


def test_the_icon_is_the_icon_of_the_console() -> None:
    kind, _, content = METADATA["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == (ROOT / "app" / "console" / "static" / "icon.svg").read_bytes()


def test_annotations_are_known_to_artifact_hub() -> None:
    """Source of the category: Artifact Hub's documentation, "Helm annotations"."""
    annotations = METADATA["annotations"]
    assert annotations["artifacthub.io/category"] == "ai-machine-learning"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert annotations["artifacthub.io/license"] == project["license"]
    for name in ("artifacthub.io/links", "artifacthub.io/recommendations"):
        assert all(each["url"].startswith("https://") for each in yaml.safe_load(annotations[name]))


def test_addresses_are_not_placeholders() -> None:
    """The chart has no addresses of a publisher; the README lists where to add them."""
    assert "example." not in (CHART / "Chart.yaml").read_text()
    section = (CHART / "README.md").read_text().partition("## Publish the chart")[2].partition("\n## ")[0]
    for field in ("home", "sources", "maintainers", "artifacthub.io/images"):
        assert f"`{field}" in section
    assert "home" not in METADATA


MAPPINGS_OF_KUBERNETES = {"resources", "securityContext", "podSecurityContext", "labels"}
"""Each is one value, described as a whole."""


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text()
    described = dict(comments(yaml.compose(text), "", text.splitlines()))
    assert [key for key, comment in described.items() if not comment.startswith("# ")] == []
    assert len(described) > len(yaml.safe_load(text))


def comments(node: yaml.Node, prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the key of each value, and the line above it."""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        has_keys = isinstance(value, yaml.MappingNode) and bool(value.value)
        if has_keys and key.value not in MAPPINGS_OF_KUBERNETES:
            yield from comments(value, f"{name}.", lines)
        else:
            yield name, lines[key.start_mark.line - 1].lstrip()


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


PUBLISHED = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}


@pytest.fixture(scope="module")
def folder(require: Require) -> Path:
    return npm_environment("published-schemas", Path(__file__).with_name("npm_crds"), require)


def checked_with(folder: Path, documents: list[Document]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output_of(["node", "validate.mjs"], folder, text=json.dumps(documents)))
    return result


@pytest.mark.full
def test_the_published_schemas_accept_every_configuration(folder: Path) -> None:
    documents = [each for values, version in combinations() for each in render(values, kubernetes=version)]
    assert checked_with(folder, documents) == {"kinds": sorted(PUBLISHED), "faults": []}
    assert set(SCHEMAS) - PUBLISHED == {"EndpointPickerConfig", "InferencePool"}, "which no package publishes"


@pytest.mark.full
def test_the_published_schemas_reject_a_wrong_type(folder: Path) -> None:
    scaling = {"enabled": True, "engine": "keda", "prometheusUrl": "http://prometheus"}
    scaled = the(render({"autoscaling": scaling, "podMonitor": {"enabled": True}}), "ScaledObject")
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 8
    (fault,) = checked_with(folder, [scaled])["faults"]
    assert fault.startswith("ScaledObject demo-triton-gateway")


@pytest.fixture
def chart_that_shows_its_notes(tmp_path: Path) -> Path:
    """A copy of the chart with its notes in a document, because Helm shows notes of an installed release only."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    document = '\nkind: Notes\napiVersion: v1\nmetadata:\n  name: notes\ntext: {{ include "notes" . | toJson }}\n'
    (chart / "templates" / "notes.yaml").write_text(f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}{document}')
    return chart


@pytest.mark.parametrize(
    "values", [path for path in CI_FILES if "image-volume" not in path.name], ids=lambda path: path.stem
)
def test_notes_name_the_release_and_its_deployment(chart_that_shows_its_notes: Path, values: Path) -> None:
    documents = render(values, chart=chart_that_shows_its_notes)
    notes, name = the(documents, "Notes")["text"], the_gateway(documents)["metadata"]["name"]
    assert f"kubectl --namespace {NAMESPACE} rollout status deployment/{name}" in notes
    assert f"helm test {RELEASE} --namespace {NAMESPACE}" in notes


PUSHED = {"image": {"repository": "registry.example.com/image"}}
EXTERNAL = {"enabled": False, "external": {"grpcUrl": "triton:8001"}}
INGRESS = {"enabled": True, "hosts": ["a.example"], "tlsSecretName": "tls"}
FORWARDED = "port-forward service/demo-triton-gateway 8080:8000 &\n  curl http://127.0.0.1:8080/v1/pipelines"


@pytest.mark.parametrize(
    ("values", "said", "left_out"),
    [
        ({"service": {"port": 8000}}, [FORWARDED], []),
        ({"ingress": INGRESS}, ["curl https://a.example/v1/pipelines"], []),
        # docker builds of the images that have no registry
        ({}, ["--target triton ."], []),
        ({"gateway": PUSHED}, ["--target triton ."], ["triton-gateway:0.1.0"]),
        ({"triton": PUSHED}, ["triton-gateway:0.1.0"], ["--target triton"]),
        ({"triton": EXTERNAL}, [], ["--target triton"]),
        ({"gateway": PUSHED, "triton": PUSHED}, [], ["docker build"]),
        ({"global": {"imageRegistry": "mirror.example.com"}}, [], ["docker build"]),
        # the GPUs that a pod needs
        ({}, ["Each pod needs 1 of nvidia.com/gpu."], []),
        ({"triton": {"gpus": 0}}, [], ["Pending"]),
    ],
    ids=str,
)
def test_the_notes_are_about_the_values(
    chart_that_shows_its_notes: Path, values: Document, said: list[str], left_out: list[str]
) -> None:
    notes = str(the(render(values, chart=chart_that_shows_its_notes), "Notes")["text"])
    assert all(each in notes for each in said)
    assert not any(each in notes for each in left_out)
    assert "--target triton ." not in notes or notes.index("--target triton .") < notes.index("kubectl")


ACCEPTED = {
    "CKV_K8S_11": "no CPU limits: throttling adds latency; CPU requests already protect the other pods",
    "CKV_K8S_15": "IfNotPresent: a tag or digest names one image",
    "CKV_K8S_21": "the person who installs the release chooses the namespace",
    "CKV_K8S_35": "the gateway's settings are environment variables, including the key of early exits",
    "CKV_K8S_43": "a digest is a value of the chart; its default is the tag that the repository's builds have",
}
ACCEPTED_FOR_TEST_POD = {
    "CKV_K8S_8": "the pod exits by itself and needs no liveness probe",
    "CKV_K8S_9": "the pod serves no requests and needs no readiness probe",
    "CKV2_K8S_6": "the pod listens on no port",
}
ACCEPTED_WITHOUT_POLICY = {
    "CKV2_K8S_6": "pvc-values.yaml turns the NetworkPolicy off, for clusters that have their own"
}
ACCEPTED_FOR_DOCKERFILE = {
    "CKV_DOCKER_7": "the base image is a build argument with a versioned default",
}


@pytest.fixture(scope="module")
def checkov(require: Require) -> Path:
    return locked_environment("checkov", require) / "checkov"


def findings(checkov: Path, file: Path, framework: str) -> set[tuple[str, str]]:
    """Returns the policy and the resource of each failed check."""
    options = ["--framework", framework, "--skip-download", "--compact", "--output", "json"]
    done = subprocess.run([checkov, "--file", file, *options], check=False, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["summary"]["passed"] > 20, "checkov scanned nothing"
    return {(each["check_id"], each["resource"]) for each in report["results"]["failed_checks"]}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("values", CI_FILES, ids=lambda path: path.stem)
def test_the_chart_violates_accepted_policies_only(values: Path, checkov: Path, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(render_text(values, kubernetes="1.36"))
    accepted = set(ACCEPTED) | (set(ACCEPTED_WITHOUT_POLICY) if "pvc" in values.name else set())
    left = {(policy, which) for policy, which in findings(checkov, rendered, "kubernetes") if policy not in accepted}
    assert {each for each in left if not (each[0] in ACCEPTED_FOR_TEST_POD and each[1].endswith("-test"))} == set()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_dockerfile_violates_accepted_policies_only(checkov: Path) -> None:
    found = {policy for policy, _ in findings(checkov, ROOT / "Dockerfile", "dockerfile")}
    assert found == set(ACCEPTED_FOR_DOCKERFILE)
