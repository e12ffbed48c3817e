"""Consistency checks between the documents of a release, which a schema cannot express.

A pod is complete and safe, and ends in order. Services, routes and policies match the pods. Each public function with a
release is a check and yields its findings. Source of the rules of the ``restricted`` Pod Security Standard: Kubernetes
documentation, "Pod Security Standards", version 1.30.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import getmembers, isfunction, signature
from typing import Any

from tests.helm.rendering import Document, of_kind, the_gateway

QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[0-9a-f]{64})")
EXTERNAL_SECRETS = {"early-exit", "bucket-credentials", "inference-tls", "registry-credentials", "gateway-redis"}
EXTERNAL_SECRETS |= {"gateway-api-keys", "triton-client", "triton-token", "gateway-test-key", "gateway-settings"}
EXTERNAL_SECRETS |= {"redis-client", "collector-ca"}
"""Secrets that the values files of ci/ name and the chart does not create."""
SHUTDOWN_MARGIN_S = 5
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"}
VOLUMES |= {"secret"}


@dataclass
class Release:
    """The documents of a release. ``pods`` and ``labels``: of Deployments and Pods, by their name."""

    documents: list[Document]
    pods: dict[str, Document] = field(init=False)
    labels: dict[str, dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        templates = {each["metadata"]["name"]: each["spec"]["template"] for each in self.of("Deployment")}
        templates |= {each["metadata"]["name"]: each for each in self.of("Pod")}
        self.pods = {name: each["spec"] for name, each in templates.items()}
        self.labels = {name: each["metadata"]["labels"] for name, each in templates.items()}

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
            yield from containers_of(pod)

    def tritons(self) -> Iterator[tuple[Document, Document]]:
        """Each sidecar, with the spec of its pod."""
        for pod in self.pods.values():
            yield from ((each, pod) for each in pod.get("initContainers", []) if each["name"] == "triton")

    def selected(self, selector: dict[str, str]) -> set[str]:
        """The names of the Deployments and Pods whose pods have these labels."""
        return {name for name, own in self.labels.items() if selector.items() <= own.items()}

    def ports(self, selector: dict[str, str]) -> dict[str, int]:
        """Port numbers by name, of the containers of the selected pods."""
        containers = [each for name in self.selected(selector) for each in containers_of(self.pods[name])]
        return {port["name"]: port["containerPort"] for each in containers for port in each.get("ports", [])}


def containers_of(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


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
        mounted = {mount["name"] for each in containers_of(pod) for mount in each.get("volumeMounts", [])}
        yield from (f"{name}: {each} is mounted but is not a volume" for each in mounted - volumes)
        yield from (f"{name}: volume {each} is not mounted" for each in volumes - mounted)


def config_items(release: Release) -> Iterator[str]:
    """Every key that a volume uses from a ConfigMap of the release exists, and every key is used."""
    maps = {
        each["metadata"]["name"]: {**each.get("data", {}), **each.get("binaryData", {})}
        for each in release.of("ConfigMap")
    }
    for pod in release.pods.values():
        for volume in pod.get("volumes", []):
            if source := volume.get("configMap"):
                taken, there = {item["key"] for item in source["items"]}, set(maps.get(source["name"], {}))
                yield from (f"ConfigMap {source['name']} and its volume differ in {key}" for key in taken ^ there)


def references(release: Release) -> Iterator[str]:
    accounts = release.names("ServiceAccount") | {"default"}
    for name, pod in release.pods.items():
        if pod.get("serviceAccountName") not in accounts:
            yield f"{name}: there is no ServiceAccount {pod.get('serviceAccountName')}"
    yield from (f"there is no Secret {name}" for name in set(_secrets(release.documents)) - EXTERNAL_SECRETS)


def _secrets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (node[key]["name"] for key in ("secretKeyRef", "secretRef") if key in node)
        yield from (each["name"] for each in node.get("imagePullSecrets", []))
        yield from (node[key] for key in ("secretName",) if key in node)
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _secrets(child)


def probe_ports(release: Release) -> Iterator[str]:
    for container in release.containers():
        own = {port["name"] for port in container.get("ports", [])}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = container.get(kind, {}).get("httpGet", {}).get("port")
            if port is not None and port not in own:
                yield f"{container['name']}: {kind} uses port {port}, which the container does not declare"


def liveness_ignores_readiness(release: Release) -> Iterator[str]:
    for container in release.containers():
        for kind in ("startupProbe", "livenessProbe"):
            if "ready" in str(container.get(kind, "")):
                yield f"{container['name']}: {kind} checks readiness"


def hung_containers(release: Release) -> Iterator[str]:
    """A hung container is killed within a minute, not after the grace period of the whole pod."""
    for container in release.containers():
        for kind in {"startupProbe", "livenessProbe"} & set(container):
            seconds = container[kind].get("terminationGracePeriodSeconds")
            if seconds is None or not 0 < seconds <= 50:
                yield f"{container['name']}: {kind} kills after {seconds} s"


def grace(release: Release) -> Iterator[str]:
    pod = release.gateway["spec"]["template"]["spec"]
    (gateway,) = (each for each in pod["containers"] if each["name"] == "gateway")
    phases = {each["name"]: each.get("value") for each in gateway["env"]}
    needed = SHUTDOWN_MARGIN_S + float(phases["GATEWAY_SHUTDOWN_DELAY_S"]) + float(phases["GATEWAY_DRAIN_S"])
    needed += gateway.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    for triton, _ in release.tritons():
        needed += float(next(word for word in triton["args"] if "--exit-timeout-secs=" in word).partition("=")[2])
    if pod["terminationGracePeriodSeconds"] < needed:
        yield f"the grace period is {pod['terminationGracePeriodSeconds']} s, and {needed:g} s may be needed"


def sidecar_order(release: Release) -> Iterator[str]:
    """An ordinary init container must exit before the gateway starts, and Triton never exits."""
    for container, _ in release.tritons():
        if container.get("restartPolicy") != "Always":
            yield f"{container['name']} is not a sidecar"


def loopback(release: Release) -> Iterator[str]:
    """Only the gateway can reach Triton's API."""
    for container in release.containers():
        for service in ("http", "grpc"):
            said = [word for word in container.get("args", []) if word.startswith(f"--{service}-address=")]
            if container["name"] == "triton" and said != [f"--{service}-address=127.0.0.1"]:
                yield f"Triton's {service} is not on loopback: {said}"


def triton_address(release: Release) -> Iterator[str]:
    """The gateway calls the port that its own Triton listens on."""
    for triton, pod in release.tritons():
        urls = [e["value"] for c in pod["containers"] for e in c.get("env", []) if e["name"] == "GATEWAY_TRITON_URL"]
        ports = [word.partition("=")[2] for word in triton["args"] if "--grpc-port=" in word]
        if urls != [f"127.0.0.1:{ports[0]}"]:
            yield f"the gateway calls {urls}, Triton listens on port {ports}"


def quantities(release: Release) -> Iterator[str]:
    for container in release.containers():
        resources = container.get("resources", {})
        used = [value for side in ("requests", "limits") for value in resources.get(side, {}).values()]
        yield from (
            f"{container['name']}: {each} is not a quantity" for each in used if not QUANTITY.fullmatch(str(each))
        )
        for name, wanted in resources.get("requests", {}).items():
            limit = resources.get("limits", {}).get(name)
            if limit is not None and _amount(wanted) > _amount(limit):
                yield f"{container['name']}: requests {wanted} of {name}, but the limit is {limit}"
        if "memory" not in resources.get("limits", {}):
            yield f"{container['name']}: has no memory limit"


def shared_memory(release: Release) -> Iterator[str]:
    """/dev/shm counts against the memory limit of the container that writes to it."""
    for container, pod in release.tritons():
        sizes = {
            each["name"]: each["emptyDir"].get("sizeLimit") for each in pod.get("volumes", []) if "emptyDir" in each
        }
        if "/dev/shm" not in {mount["mountPath"] for mount in container.get("volumeMounts", [])}:
            yield f"{container['name']}: /dev/shm has the runtime's 64 MiB"
        elif _amount(sizes["shm"]) > _amount(container["resources"]["limits"]["memory"]) / 2:
            yield f"{container['name']}: /dev/shm may take more than half of its memory"


def _amount(quantity: str | int) -> float:
    """In the base unit: cores or bytes."""
    match = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(quantity))
    if match is None:
        return float("nan")
    return float(match[1]) * (1e-3 if match[2] == "m" else UNITS.get(match[2], float("nan")))


def images(release: Release) -> Iterator[str]:
    for container in release.containers():
        if not IMAGE.fullmatch(container["image"]) or container["image"].endswith(":latest"):
            yield f"{container['name']}: {container['image']} does not name a single image"


def environments(release: Release) -> Iterator[str]:
    for container in release.containers():
        names = [each["name"] for each in container.get("env", [])]
        yield from (f"{container['name']}: {name} is set twice" for name in {n for n in names if names.count(n) > 1})
        numbers = [each["name"] for each in container.get("env", []) if not isinstance(each.get("value", ""), str)]
        yield from (f"{container['name']}: {name} is not a string" for name in numbers)


def writable_folders(release: Release) -> Iterator[str]:
    for container in release.containers():
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        is_server = container["name"] in {"gateway", "triton"}
        if is_server and container["securityContext"].get("readOnlyRootFilesystem") and "/tmp" not in mounted:
            yield f"{container['name']}: has no writable /tmp"


def service_links(release: Release) -> Iterator[str]:
    for name, pod in release.pods.items():
        if pod.get("enableServiceLinks") is not False:
            yield f"{name}: a Service called `gateway` would set GATEWAY_PORT"
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: mounts a service account token that the pod does not use"


def pod_security(release: Release) -> Iterator[str]:
    for name, pod in release.pods.items():
        yield from (f"{name}: {key} is true" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key))
        for volume in pod.get("volumes", []):
            if kinds := set(volume) - {"name"} - VOLUMES:
                yield f"{name}: volume {volume['name']} is a {kinds.pop()}"
        for container in containers_of(pod):
            breaches = _breaches(container, pod.get("securityContext", {}))
            yield from (f"{name}: container {container['name']} {breach}" for breach, is_found in breaches if is_found)


def _breaches(container: Document, whole_pod: Document) -> Iterator[tuple[str, bool]]:
    """Yields each rule of a container, and whether it is violated."""
    own = container.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    profile = own.get("seccompProfile", whole_pod.get("seccompProfile", {}))
    added = set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}
    yield "may escalate privileges", own.get("allowPrivilegeEscalation") is not False
    yield "is privileged", bool(own.get("privileged"))
    yield "keeps capabilities", "ALL" not in capabilities.get("drop", []) or bool(added)
    yield "may run as root", own.get("runAsNonRoot", whole_pod.get("runAsNonRoot")) is not True
    yield "runs as root", own.get("runAsUser", whole_pod.get("runAsUser")) == 0
    yield "has no seccomp profile", profile.get("type") not in {"RuntimeDefault", "Localhost"}
    yield "takes a port of the node", any("hostPort" in port for port in container.get("ports", []))


def unique_names(release: Release) -> Iterator[str]:
    seen = [(each["kind"], each["metadata"]["name"]) for each in release.documents]
    yield from (f"{kind} {name} exists twice" for kind, name in {each for each in seen if seen.count(each) > 1})


def selectors(release: Release) -> Iterator[str]:
    """Each selector matches the pods of one Deployment, and no test pod."""
    wanted = [(each["metadata"]["name"], each["spec"]["selector"]["matchLabels"]) for each in release.of("Deployment")]
    for name, selector in wanted:
        if name not in release.selected(selector):
            yield f"{name} does not select its own pods"
    wanted += [("Service", each["spec"]["selector"]) for each in release.of("Service")]
    for kind in ("InferencePool", "PodDisruptionBudget", "PodMonitor"):
        wanted += [(kind, each["spec"]["selector"]["matchLabels"]) for each in release.of(kind)]
    wanted += [("NetworkPolicy", each["spec"]["podSelector"]["matchLabels"]) for each in release.of("NetworkPolicy")]
    for name, selector in wanted:
        found = release.selected(selector)
        if not found & release.names("Deployment"):
            yield f"{name} selects {selector}, but the pods have other labels"
        if len(found) > 1:
            yield f"{name} selects {sorted(found)}"


def service_ports(release: Release) -> Iterator[str]:
    for service in release.of("Service"):
        names = release.ports(service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in names:
                yield f"the Service uses port {port['targetPort']}, which no container has"


def monitored_ports(release: Release) -> Iterator[str]:
    for monitor in release.of("PodMonitor"):
        names = release.ports(monitor["spec"]["selector"]["matchLabels"])
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in names:
                yield f"the PodMonitor uses port {endpoint['port']}, which no container has"
    for monitor in release.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [each for each in release.of("Service") if wanted <= each["metadata"]["labels"].items()]
        if len(services) != 1:
            yield f"the ServiceMonitor selects {len(services)} Services"
        names = {port["name"] for each in services for port in each["spec"]["ports"]}
        asked = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        yield from (f"the ServiceMonitor and its Service differ in port {port}" for port in names ^ asked)


OPEN_PORTS = {8080}
"""The API. All other ports are for the sources in the values only."""


def network_policy_ports(release: Release) -> Iterator[str]:
    """Exactly the ports of the pod are allowed, and all but the API only for the configured sources."""
    for policy in release.of("NetworkPolicy"):
        numbers = set(release.ports(policy["spec"]["podSelector"]["matchLabels"]).values())
        allowed = {port["port"]: rule.get("from") for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        yield from (f"the NetworkPolicy and the pod differ in port {port}" for port in numbers ^ set(allowed))
        for port, peers in allowed.items():
            if port not in OPEN_PORTS and not peers:
                yield f"the NetworkPolicy opens port {port} to all clients"


def routes(release: Release) -> Iterator[str]:
    services = {each["metadata"]["name"]: each["spec"]["ports"] for each in release.of("Service")}
    backends = [
        (path["backend"]["service"]["name"], path["backend"]["service"]["port"].get("name"))
        for ingress in release.of("Ingress")
        for rule in ingress["spec"]["rules"]
        for path in rule["http"]["paths"]
    ]
    backends += [
        (backend["name"], backend["port"])
        for route in release.of("HTTPRoute")
        for rule in route["spec"]["rules"]
        for backend in rule["backendRefs"]
    ]
    for service, port in backends:
        if not any(port in (each["name"], each["port"]) for each in services.get(service, [])):
            yield f"a route leads to {service} {port}, which is not a port of a Service"


def budgets(release: Release) -> Iterator[str]:
    """Kubernetes accepts one of the two numbers, which its schema does not say."""
    for budget in release.of("PodDisruptionBudget"):
        numbers = {"minAvailable", "maxUnavailable"} & set(budget["spec"])
        if len(numbers) != 1:
            yield f"the PodDisruptionBudget has {sorted(numbers)}"


def tls_hosts(release: Release) -> Iterator[str]:
    for ingress in release.of("Ingress"):
        covered = {host for tls in ingress["spec"].get("tls", []) for host in tls["hosts"]}
        served = {rule["host"] for rule in ingress["spec"]["rules"]}
        if covered and covered != served:
            yield f"TLS is for {covered}, rules for {served}"


def autoscaled(release: Release) -> Iterator[str]:
    scalers = release.of("HorizontalPodAutoscaler") + release.of("ScaledObject")
    for target in (each["spec"]["scaleTargetRef"] for each in scalers):
        if target["name"] not in release.names(target["kind"]):
            yield f"there is no {target['kind']} {target['name']} to scale"
    if scalers and "replicas" in release.gateway["spec"]:
        yield "every upgrade would reset the number of replicas that the autoscaler set"
