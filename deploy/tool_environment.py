"""Separate environments in .cache for tools and clients whose pins conflict with the gateway's packages."""

from pathlib import Path

from deploy.bootstrap import (
    CACHE,
    REQUIREMENTS,
    Environment,
    being_made,
    find_gateway_python,
    install,
    only_one_at_a_time,
)


def tool_environment(name: str) -> Path:
    """Creates or updates the environment of ``requirements/<name>.txt``. Returns the folder with its programs."""
    environment = Environment(CACHE / name, (REQUIREMENTS / f"{name}.txt",), (REQUIREMENTS / "bootstrap.txt",))
    with only_one_at_a_time():
        if not environment.is_current():
            with being_made(environment, find_gateway_python(), "--without-pip"):
                install(environment)
    return environment.python.parent
