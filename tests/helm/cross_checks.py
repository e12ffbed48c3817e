"""Consistency checks between the documents of a release, which a schema cannot express."""

from collections.abc import Callable, Iterator

from tests.helm import pod_checks, traffic_checks
from tests.helm.release import Release
from tests.helm.rendering import Document

CHECKS: tuple[Callable[[Release], Iterator[str]], ...] = (
    traffic_checks.autoscaled,
    traffic_checks.budgets,
    pod_checks.config_items,
    pod_checks.environments,
    pod_checks.grace,
    pod_checks.hung_containers,
    pod_checks.images,
    pod_checks.liveness_ignores_readiness,
    pod_checks.loopback,
    traffic_checks.monitored_ports,
    pod_checks.mounts,
    traffic_checks.network_policy_ports,
    pod_checks.pod_security,
    pod_checks.probe_ports,
    pod_checks.quantities,
    pod_checks.references,
    traffic_checks.routes,
    traffic_checks.selectors,
    pod_checks.service_links,
    traffic_checks.service_ports,
    pod_checks.shared_memory,
    pod_checks.sidecar_order,
    traffic_checks.tls_hosts,
    pod_checks.triton_address,
    pod_checks.unique_names,
    pod_checks.writable_folders,
)


def faults(documents: list[Document]) -> dict[str, list[str]]:
    """Returns the findings by check; checks without findings are omitted."""
    release = Release(documents)
    found = {check.__name__: list(check(release)) for check in CHECKS}
    return {name: findings for name, findings in found.items() if findings}
