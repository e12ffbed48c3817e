"""Checks that Services, routes and policies match the pods. Each check yields its findings."""

from collections.abc import Iterator

from tests.helm.release import Release


def selectors(release: Release) -> Iterator[str]:
    """Each selector matches the pods of one Deployment, and no test pod."""
    for each in release.of("Deployment"):
        name = each["metadata"]["name"]
        if name not in release.selected(each["spec"]["selector"]["matchLabels"]):
            yield f"{name} does not select its own pods"
    wanted = [(each["metadata"]["name"], each["spec"]["selector"]["matchLabels"]) for each in release.of("Deployment")]
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
    for scaler in release.of("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        if target["name"] not in release.names(target["kind"]):
            yield f"there is no {target['kind']} {target['name']} to scale"
    for scaler in release.of("ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        if target["name"] not in release.names(target["kind"]):
            yield f"there is no {target['kind']} {target['name']} to scale"
    is_scaled = release.of("HorizontalPodAutoscaler") or release.of("ScaledObject")
    if is_scaled and "replicas" in release.gateway["spec"]:
        yield "every upgrade would reset the number of replicas that the autoscaler set"
