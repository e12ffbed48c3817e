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


def notes_of(chart: Path, values: Document) -> str:
    return str(the(render(values, chart=chart), "Notes")["text"])


def test_notes_forward_the_port_of_the_service(chart_that_shows_its_notes: Path) -> None:
    notes = notes_of(chart_that_shows_its_notes, {"service": {"port": 8000}})
    assert "port-forward service/demo-triton-gateway 8080:8000 &\n  curl http://127.0.0.1:8080/v1/pipelines" in notes


def test_notes_call_the_host_of_the_ingress(chart_that_shows_its_notes: Path) -> None:
    ingress = {"enabled": True, "hosts": ["a.example"], "tlsSecretName": "tls"}
    assert "curl https://a.example/v1/pipelines" in notes_of(chart_that_shows_its_notes, {"ingress": ingress})


def test_notes_show_docker_builds_without_a_registry(chart_that_shows_its_notes: Path) -> None:
    bare = notes_of(chart_that_shows_its_notes, {})
    assert bare.index("--target triton .") < bare.index("kubectl")
    image = {"image": {"repository": "registry.example.com/image"}}
    gateway_pushed = notes_of(chart_that_shows_its_notes, {"gateway": image})
    assert "--target triton ." in gateway_pushed
    assert "triton-gateway:0.1.0" not in gateway_pushed
    models_pushed = notes_of(chart_that_shows_its_notes, {"triton": image})
    assert "triton-gateway:0.1.0" in models_pushed
    assert "--target triton" not in models_pushed
    assert "docker build" not in notes_of(chart_that_shows_its_notes, {"gateway": image, "triton": image})
    assert "docker build" not in notes_of(
        chart_that_shows_its_notes, {"global": {"imageRegistry": "mirror.example.com"}}
    )
    external = {"enabled": False, "external": {"grpcUrl": "triton:8001"}}
    assert "--target triton" not in notes_of(chart_that_shows_its_notes, {"triton": external})


def test_the_notes_name_the_gpus_that_a_pod_needs(chart_that_shows_its_notes: Path) -> None:
    assert "Each pod needs 1 of nvidia.com/gpu." in notes_of(chart_that_shows_its_notes, {})
    assert "Pending" not in notes_of(chart_that_shows_its_notes, {"triton": {"gpus": 0}})
