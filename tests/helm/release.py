"""The documents of one release, for the cross checks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.helm.rendering import Document, of_kind


@dataclass
class Release:
    """The documents of a release, and its pod specs by name."""

    documents: list[Document]
    pods: dict[str, Document] = field(init=False)

    def __post_init__(self) -> None:
        deployed = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in self.of("Deployment")}
        alone = {each["metadata"]["name"]: each["spec"] for each in self.of("Pod")}
        self.pods = deployed | alone

    def of(self, kind: str) -> list[Document]:
        return of_kind(self.documents, kind)

    def names(self, kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in self.of(kind)}

    def containers(self) -> Iterator[Document]:
        for pod in self.pods.values():
            yield from (*pod.get("initContainers", []), *pod["containers"])

    def tritons(self) -> Iterator[tuple[Document, Document]]:
        """Each sidecar, with the spec of its pod."""
        for pod in self.pods.values():
            yield from ((each, pod) for each in pod.get("initContainers", []) if each["name"] == "triton")

    def pod_labels(self) -> dict[str, str]:
        (deployment,) = self.of("Deployment")
        labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
        return labels

    def ports(self) -> dict[str, int]:
        """Port numbers of the Deployment's containers by name."""
        (deployment,) = self.of("Deployment")
        pod = deployment["spec"]["template"]["spec"]
        containers = [*pod.get("initContainers", []), *pod["containers"]]
        return {port["name"]: port["containerPort"] for each in containers for port in each.get("ports", [])}
