"""The rules of the ``restricted`` Pod Security Standard that a pod of this chart could violate.

Source: Kubernetes documentation, "Pod Security Standards", version 1.30.
"""

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def breaches(pod: dict[str, Any]) -> Iterator[str]:
    """Yields the violations of a pod spec."""
    yield from (f"{field} is true" for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field))
    for volume in pod.get("volumes", []):
        if kinds := set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is a {kinds.pop()}"
    whole_pod = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        for breach in _container_breaches(container, whole_pod):
            yield f"container {container['name']}: {breach}"


def _container_breaches(container: dict[str, Any], whole_pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may escalate privileges"
    if own.get("privileged"):
        yield "is privileged"
    if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "keeps capabilities"
    if own.get("runAsNonRoot", whole_pod.get("runAsNonRoot")) is not True:
        yield "may run as root"
    if own.get("runAsUser", whole_pod.get("runAsUser")) == 0:
        yield "runs as root"
    profile = own.get("seccompProfile", whole_pod.get("seccompProfile", {}))
    if profile.get("type") not in {"RuntimeDefault", "Localhost"}:
        yield "has no seccomp profile"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "takes a port of the node"
