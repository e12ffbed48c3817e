"""What is wrong with the documents of a release: by the schemas of Kubernetes, and between documents.

The schemas are Kubernetes' own, from the validator's wheel, and those of custom resources in ``custom_resources/``.
Each public function with a release is a check of what no schema expresses, and yields its findings. Source of the rules
of the ``restricted`` Pod Security Standard: Kubernetes documentation, "Pod Security Standards", version 1.30.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from inspect import getmembers, isfunction, signature
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from kubernetes_validate import utils
from referencing import Registry, Resource

from tests.helm.rendering import Document, of_kind

SCHEMAS = {
    path.stem: Draft202012Validator(yaml.safe_load(path.read_text()))
    for path in sorted((Path(__file__).parent / "custom_resources").glob("*.yaml"))
}
"""By kind."""


def custom_faults(document: Document) -> Iterator[str]:
    faults = SCHEMAS[document["kind"]].iter_errors(document)
    yield from (f"{document['kind']}: {fault.message}" for fault in faults)


def schema_faults(documents: list[Document], kubernetes: str) -> Iterator[str]:
    for document in documents:
        if document["kind"] in SCHEMAS:
            yield from custom_faults(document)
            continue
        try:
            validator = validator_of(document["kind"], document["apiVersion"], kubernetes)
        except FileNotFoundError:
            yield f"{document['kind']} {document['apiVersion']} is unknown to Kubernetes {kubernetes}"
            continue
        if (error := best_match(validator.iter_errors(document))) is not None:
            yield f"{document['kind']}: {error.message}"


@cache
def validator_of(kind: str, api_version: str, kubernetes: str) -> Draft202012Validator:
    """What ``kubernetes_validate.validate`` makes again for each document. Raises FileNotFoundError."""
    group_and_version = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _schema(f"{kind.lower()}-{group_and_version}", kubernetes)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(kubernetes))


@cache
def _definitions(kubernetes: str) -> Registry:
    return (Resource.from_contents(_schema("_definitions", kubernetes)) @ Registry()).crawl()


def _schema(name: str, kubernetes: str) -> Document:
    (release,) = {each for each in utils.all_versions() if utils.major_minor(each) == kubernetes}
    schema: Document = utils.schema_contents(f"kubernetes-json-schema/v{release}-local-strict/{name}.json", release)
    return schema


QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
UNITS = {None: 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[0-9a-f]{64})")
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"}
VOLUMES |= {"secret"}


class Release:
    """The documents of a release. ``pods`` and ``labels``: of Deployments and Pods, by their name."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.deployments = {each["metadata"]["name"]: each for each in of_kind(documents, "Deployment")}
        templates = {name: each["spec"]["template"] for name, each in self.deployments.items()}
        templates |= {each["metadata"]["name"]: each for each in of_kind(documents, "Pod")}
        self.pods: dict[str, Document] = {name: each["spec"] for name, each in templates.items()}
        self.labels: dict[str, dict[str, str]] = {name: each["metadata"]["labels"] for name, each in templates.items()}

    def containers(self) -> Iterator[tuple[Document, Document]]:
        """Each container, with the spec of its pod."""
        for pod in self.pods.values():
            yield from ((each, pod) for each in (*pod.get("initContainers", []), *pod["containers"]))


def faults(documents: list[Document]) -> dict[str, list[str]]:
    """Returns the findings by check; checks without findings are omitted."""
    release = Release(documents)
    checks = getmembers(
        sys.modules[__name__], lambda each: isfunction(each) and [*signature(each).parameters] == ["release"]
    )
    found = {name: list(check(release)) for name, check in checks}
    return {name: findings for name, findings in found.items() if findings}


def mounts(release: Release) -> Iterator[str]:
    for name, pod in release.pods.items():
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        mounted = {
            mount["name"] for each, own in release.containers() if own is pod for mount in each.get("volumeMounts", [])
        }
        yield from (f"{name}: {each} is mounted but is not a volume" for each in mounted - volumes)
        yield from (f"{name}: volume {each} is not mounted" for each in volumes - mounted)


def quantities(release: Release) -> Iterator[str]:
    """/dev/shm counts against the memory limit of the container that writes to it."""
    for container, pod in release.containers():
        resources = container.get("resources", {})
        limits = resources.get("limits", {})
        for name, wanted in resources.get("requests", {}).items():
            if _amount(wanted) > _amount(limits.get(name, wanted)):
                yield f"{container['name']}: requests {wanted} of {name}, but the limit is {limits[name]}"
        if "memory" not in limits:
            yield f"{container['name']}: has no memory limit"
        for volume in pod.get("volumes", []):
            size = volume.get("emptyDir", {}).get("sizeLimit", "0")
            is_shm = (container["name"], volume["name"]) == ("triton", "shm")
            if is_shm and _amount(size) > _amount(limits["memory"]) / 2:
                yield "triton: /dev/shm may take more than half of its memory"


def _amount(quantity: str | int) -> float:
    found = QUANTITY.fullmatch(str(quantity))
    assert found, f"{quantity} is not a quantity"
    return float(found[1]) * UNITS[found[2]]


def images(release: Release) -> Iterator[str]:
    for container, _ in release.containers():
        if not IMAGE.fullmatch(container["image"]) or container["image"].endswith(":latest"):
            yield f"{container['name']}: {container['image']} does not name a single image"


def environments(release: Release) -> Iterator[str]:
    for container, _ in release.containers():
        names = [each["name"] for each in container.get("env", [])]
        yield from (f"{container['name']}: {name} is set twice" for name in {n for n in names if names.count(n) > 1})


def pod_security(release: Release) -> Iterator[str]:
    """Pods comply with the restricted standard, and get neither a token nor the variables of Services.

    A Service called `gateway` would set GATEWAY_PORT.
    """
    for name, pod in release.pods.items():
        yield from (f"{name}: {key} is true" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key))
        unused = ("enableServiceLinks", "automountServiceAccountToken")
        yield from (f"{name}: {key} is not false" for key in unused if pod.get(key) is not False)
        kinds = {kind for volume in pod.get("volumes", []) for kind in volume} - {"name"} - VOLUMES
        yield from (f"{name}: a volume is a {kind}" for kind in kinds)
    for container, pod in release.containers():
        context = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        for breach, is_found in (
            ("may escalate privileges", context.get("allowPrivilegeEscalation") is not False),
            ("is privileged", bool(context.get("privileged"))),
            ("keeps capabilities", capabilities.get("drop") != ["ALL"] or "add" in capabilities),
            ("may run as root", context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0),
            ("has no seccomp profile", context.get("seccompProfile") != {"type": "RuntimeDefault"}),
            ("takes a port of the node", any("hostPort" in port for port in container.get("ports", []))),
        ):
            if is_found:
                yield f"{container['name']} {breach}"


def unique_names(release: Release) -> Iterator[str]:
    seen = [(each["kind"], each["metadata"]["name"]) for each in release.documents]
    yield from (f"{kind} {name} exists twice" for kind, name in {each for each in seen if seen.count(each) > 1})


def selectors(release: Release) -> Iterator[str]:
    """Each selector matches the pods of one Deployment, its own if it has pods, and no test pod."""
    for kind in ("Deployment", "InferencePool", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Service"):
        for each in of_kind(release.documents, kind):
            selector = each["spec"].get("podSelector") or each["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            found = {name for name, labels in release.labels.items() if wanted <= labels.items()}
            expected = {each["metadata"]["name"]} if kind == "Deployment" else found & release.deployments.keys()
            if len(found) != 1 or found != expected:
                yield f"{kind} {each['metadata']['name']} selects the pods of {sorted(found)}"
