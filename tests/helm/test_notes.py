"""The commands that NOTES.txt prints."""

import shutil
from pathlib import Path

import pytest

from tests.helm.rendering import CHART, CI_FILES, NAMESPACE, RELEASE, Document, render, the, the_gateway


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
