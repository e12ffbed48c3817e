"""Validates custom resources with the schemas that their operators publish in an npm package."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Require
from tests.helm.rendering import Document, combinations, render, the
from tests.helm.schema_check import SCHEMAS
from tests.toolkit.environments import npm_environment

pytestmark = pytest.mark.full

PUBLISHED = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}


@pytest.fixture(scope="module")
def folder(require: Require) -> Path:
    return npm_environment("published-schemas", Path(__file__).with_name("npm_crds"), require)


def checked(folder: Path, documents: list[Document]) -> dict[str, Any]:
    done = subprocess.run(
        ["node", "validate.mjs"], cwd=folder, input=json.dumps(documents), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_published_schemas_accept_every_configuration(folder: Path) -> None:
    documents = [each for values, version in combinations() for each in render(values, kubernetes=version)]
    assert checked(folder, documents) == {"kinds": sorted(PUBLISHED), "faults": []}
    assert set(SCHEMAS) - PUBLISHED == {"EndpointPickerConfig", "InferencePool"}, "which no package publishes"


def test_the_published_schemas_reject_a_wrong_type(folder: Path) -> None:
    scaling = {"enabled": True, "engine": "keda", "prometheusUrl": "http://prometheus"}
    scaled = the(render({"autoscaling": scaling, "podMonitor": {"enabled": True}}), "ScaledObject")
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 8
    (fault,) = checked(folder, [scaled])["faults"]
    assert fault.startswith("ScaledObject demo-triton-gateway")
