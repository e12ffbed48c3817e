"""The documents of one release, for the cross checks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.helm.rendering import Document, of_kind, the_gateway


@dataclass
class Release:
    """The documents of a release, and its pod specs by name."""

    documents: list[Document]
    pods: dict[str, Document] = field(init=False)

    def __post_init__(self) -> None:
        deployed = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in self.of("Deployment")}
        alone = {each["metadata"]["name"]: each["spec"] for each in self.of("Pod")}
        self.pods = deployed | alone

    @property
    def gateway(self) -> Document:
        """The gateway's Deployment."""
        return the_gateway(self.documents)

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

    def selected(self, selector: dict[str, str]) -> set[str]:
        """The names of the Deployments and Pods whose pods have these labels."""
        labels = {
            each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in self.of("Deployment")
        }
        labels |= {each["metadata"]["name"]: each["metadata"]["labels"] for each in self.of("Pod")}
        return {name for name, own in labels.items() if selector.items() <= own.items()}

    def ports(self, selector: dict[str, str]) -> dict[str, int]:
        """Port numbers by name, of the containers of the selected pods."""
        pods = [self.pods[name] for name in self.selected(selector)]
        containers = [each for pod in pods for each in (*pod.get("initContainers", []), *pod["containers"])]
        return {port["name"]: port["containerPort"] for each in containers for port in each.get("ports", [])}
