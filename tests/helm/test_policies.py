"""checkov's policies for Kubernetes and for Dockerfiles, and the accepted findings with their reasons."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Require
from tests.helm.rendering import CI_FILES, ROOT, render_text
from tests.toolkit.environments import locked_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

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


@pytest.mark.parametrize("values", CI_FILES, ids=lambda path: path.stem)
def test_the_chart_violates_accepted_policies_only(values: Path, checkov: Path, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(render_text(values, kubernetes="1.36"))
    accepted = set(ACCEPTED) | (set(ACCEPTED_WITHOUT_POLICY) if "pvc" in values.name else set())
    left = {(policy, which) for policy, which in findings(checkov, rendered, "kubernetes") if policy not in accepted}
    assert {each for each in left if not (each[0] in ACCEPTED_FOR_TEST_POD and each[1].endswith("-test"))} == set()


def test_the_dockerfile_violates_accepted_policies_only(checkov: Path) -> None:
    found = {policy for policy, _ in findings(checkov, ROOT / "Dockerfile", "dockerfile")}
    assert found == set(ACCEPTED_FOR_DOCKERFILE)
