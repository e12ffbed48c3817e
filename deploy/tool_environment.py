"""Environments of tools and clients whose pins do not fit beside the gateway's: in .cache, each from its own lock."""

from pathlib import Path

from deploy.bootstrap import CACHE, REQUIREMENTS, Environment, being_made, find_gateway_python, only_one_at_a_time, sync


def tool_environment(name: str) -> Path:
    """The folder with the programs of ``requirements/<name>.txt``. Makes the environment unless it is up to date."""
    environment = Environment(CACHE / name, REQUIREMENTS / f"{name}.txt", (REQUIREMENTS / "bootstrap.txt",))
    with only_one_at_a_time():
        if not environment.is_current():
            with being_made(environment, find_gateway_python(), "--without-pip"):
                sync(environment)
    return environment.python.parent
