"""Where and when a benchmark ran."""

import datetime
import os
import platform
from pathlib import Path

ARTIFACTS = Path("artifacts/benchmarks")


def surroundings() -> str:
    """Times are comparable within one run only."""
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    return f"{now}, {os.cpu_count()} cores ({platform.machine()}), load before {os.getloadavg()[0]:.1f}"
