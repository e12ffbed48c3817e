"""Consistency checks between the documents of a release, which a schema cannot express."""

from inspect import getmembers, isfunction

from tests.helm import pod_checks, traffic_checks
from tests.helm.release import Release
from tests.helm.rendering import Document

CHECKS = {
    name: check
    for module in (pod_checks, traffic_checks)
    for name, check in getmembers(module, isfunction)
    if check.__module__ == module.__name__ and not name.startswith("_")
}


def faults(documents: list[Document]) -> dict[str, list[str]]:
    """Returns the findings by check; checks without findings are omitted."""
    release = Release(documents)
    found = {name: list(check(release)) for name, check in CHECKS.items()}
    return {name: findings for name, findings in found.items() if findings}
