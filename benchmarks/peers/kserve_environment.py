"""`.venv-kserve`: the locked environment of the KServe transformer, made when the benchmark first needs it."""

from pathlib import Path

from deploy.bootstrap import (
    REQUIREMENTS,
    ROOT,
    Environment,
    being_made,
    find_gateway_python,
    only_one_at_a_time,
    sync,
)

KSERVE = Environment(ROOT / ".venv-kserve", REQUIREMENTS / "kserve.txt", (REQUIREMENTS / "bootstrap.txt",))


def kserve_python() -> Path:
    """The environment's interpreter."""
    with only_one_at_a_time():
        if not KSERVE.is_current():
            with being_made(KSERVE, find_gateway_python(), "--without-pip"):
                sync(KSERVE)
    return KSERVE.python
