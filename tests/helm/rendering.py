"""Renders the chart with the real helm, and finds documents by kind."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "triton-gateway"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
KUBERNETES_VERSIONS = ("1.30", "1.33", "1.36")
RELEASE, NAMESPACE = "demo", "inference"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""That of libyaml needs a tenth of the time."""

Document = dict[str, Any]


class ChartRefused(Exception):
    """helm failed; the message is helm's output."""


def helm(*arguments: str, stdin: str = "") -> str:
    """Raises ChartRefused."""
    command = [str(Path(sys.executable).parent / "helm"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ChartRefused(done.stdout + done.stderr)
    return done.stdout


def render_text(values: Document | Path | None = None, *, kubernetes: str = "1.33", chart: Path = CHART) -> str:
    """The YAML of a release called ``demo`` in the namespace ``inference``. Raises ChartRefused."""
    stdin = values.read_text() if isinstance(values, Path) else json.dumps(values or {})
    template = _template_once if chart == CHART else _template
    return template(chart, kubernetes, stdin, values is not None)


def _template(chart: Path, kubernetes: str, stdin: str, has_values: bool) -> str:
    # On standard input, because helm splits the names of files at commas.
    chosen = ["--values", "-"] if has_values else []
    options = ["--namespace", NAMESPACE, "--kube-version", kubernetes, *chosen]
    return helm("template", RELEASE, str(chart), *options, stdin=stdin)


_template_once = cache(_template)
"""For the chart of the repository, which no test changes."""


def render(values: Document | Path | None = None, *, kubernetes: str = "1.33", chart: Path = CHART) -> list[Document]:
    """Raises ChartRefused."""
    text = render_text(values, kubernetes=kubernetes, chart=chart)
    return [each for each in yaml.load_all(text, LOADER) if each]


def combinations() -> list[tuple[Path, str]]:
    """Every file of ci/ with every Kubernetes version that can run it."""
    return [
        (path, version)
        for path in CI_FILES
        for version in KUBERNETES_VERSIONS
        if path.name != "image-volume-values.yaml" or version == "1.36"
    ]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [each for each in documents if each["kind"] == kind]


def the(documents: list[Document], kind: str) -> Document:
    """Returns the only document of this kind."""
    (found,) = of_kind(documents, kind)
    return found


def the_gateway(documents: list[Document]) -> Document:
    """The gateway's Deployment."""
    component = {"app.kubernetes.io/component": "gateway"}.items()
    (found,) = (each for each in of_kind(documents, "Deployment") if component <= each["metadata"]["labels"].items())
    return found


def pod_spec(documents: list[Document]) -> Document:
    """The pod's spec in the gateway's Deployment."""
    spec: Document = the_gateway(documents)["spec"]["template"]["spec"]
    return spec


def gateway_container(documents: list[Document]) -> Document:
    return container_called("gateway", pod_spec(documents)["containers"])


def triton_container(documents: list[Document]) -> Document:
    return container_called("triton", pod_spec(documents)["initContainers"])


def check_container(documents: list[Document]) -> Document:
    return container_called("check", pod_spec(documents)["initContainers"])


def container_called(name: str, containers: list[Document]) -> Document:
    (container,) = (each for each in containers if each["name"] == name)
    return dict(container)


def environment_of(container: Document) -> dict[str, str]:
    """Returns the variables that are set with ``value``, not with ``valueFrom``."""
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
