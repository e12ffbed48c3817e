"""Checks that Services, routes and policies match the pods. Each check yields its findings."""

from collections.abc import Iterator

from tests.helm.release import Release


def selectors(release: Release) -> Iterator[str]:
    labels = release.pod_labels().items()
    wanted = [(each["metadata"]["name"], each["spec"]["selector"]["matchLabels"]) for each in release.of("Deployment")]
    wanted += [("Service", each["spec"]["selector"]) for each in release.of("Service")]
    for kind in ("InferencePool", "PodDisruptionBudget", "PodMonitor"):
        wanted += [(kind, each["spec"]["selector"]["matchLabels"]) for each in release.of(kind)]
    wanted += [("NetworkPolicy", each["spec"]["podSelector"]["matchLabels"]) for each in release.of("NetworkPolicy")]
    for name, selector in wanted:
        if not selector.items() <= labels:
            yield f"{name} selects {selector}, which the pods are not"
        for pod in release.of("Pod"):
            if selector.items() <= pod["metadata"]["labels"].items():
                yield f"{name} also selects {pod['metadata']['name']}"


def service_ports(release: Release) -> Iterator[str]:
    names = release.ports()
    for service in release.of("Service"):
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in names:
                yield f"the Service aims at port {port['targetPort']}, which no container has"


def monitored_ports(release: Release) -> Iterator[str]:
    names = release.ports()
    for monitor in release.of("PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in names:
                yield f"the PodMonitor asks port {endpoint['port']}, which no container has"


def network_policy_ports(release: Release) -> Iterator[str]:
    """Exactly the ports of the pod are allowed, and the metrics only for the configured sources."""
    numbers = set(release.ports().values())
    for policy in release.of("NetworkPolicy"):
        let_in = {port["port"]: rule.get("from") for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        yield from (f"the NetworkPolicy and the pod differ in port {port}" for port in numbers ^ set(let_in))
        for port, peers in let_in.items():
            if port != 8080 and not peers:
                yield f"the NetworkPolicy opens port {port} to anyone"


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
            yield f"a route leads to {service} {port}, which is no Service's port"


def tls_hosts(release: Release) -> Iterator[str]:
    for ingress in release.of("Ingress"):
        covered = {host for tls in ingress["spec"].get("tls", []) for host in tls["hosts"]}
        served = {rule["host"] for rule in ingress["spec"]["rules"]}
        if covered and covered != served:
            yield f"TLS is for {covered}, rules for {served}"


def autoscaled(release: Release) -> Iterator[str]:
    for scaler in release.of("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        if target["name"] not in release.names(target["kind"]):
            yield f"there is no {target['kind']} {target['name']} to scale"
    for scaler in release.of("ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        if target["name"] not in release.names(target["kind"]):
            yield f"there is no {target['kind']} {target['name']} to scale"
    if release.of("HorizontalPodAutoscaler") or release.of("ScaledObject"):
        for deployment in release.of("Deployment"):
            if "replicas" in deployment["spec"]:
                yield "replicas would undo what the autoscaler decides at every upgrade"
