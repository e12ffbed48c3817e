"""The time, the machine and the versions of a benchmark run."""

import datetime
import os
import platform
import re
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
ARTIFACTS = Path("artifacts/benchmarks")
INSTALLED = ("triton-gateway", "fastapi", "uvicorn", "uvloop", "tritonclient", "grpcio")
LOCKED = {"kserve": "kserve.txt", "nvidia-pytriton": "triton.txt"}
"""Packages of other environments -> their lock files."""


def surroundings() -> str:
    """Describes the time and the load of the run. Times are comparable only within one run."""
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    return f"{now}, {os.cpu_count()} cores ({platform.machine()}), load before {os.getloadavg()[0]:.1f}"


def machine() -> str:
    """Describes the processor, the memory and the system."""
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    system = f"{platform.system()} {platform.release().split('-')[0]}, {interpreter()}"
    return f"Machine: {_processor()}, {os.cpu_count()} cores, {memory}; {system}."


def interpreter() -> str:
    """Describes the interpreter and its build, on which CPU times depend."""
    if sys.base_prefix == "/usr":
        build = "the distribution's build"
    else:
        is_optimized = "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS"))
        build = f"built {'with' if is_optimized else 'without'} --enable-optimizations"
    return f"Python {platform.python_version()}, {build}"


def versions() -> str:
    found = {name: version(name) for name in INSTALLED} | {name: _locked(name, file) for name, file in LOCKED.items()}
    return f"Versions: {', '.join(f'{name} {number}' for name, number in found.items())}."


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.machine()


def _locked(name: str, file: str) -> str:
    found = re.search(rf"^{name}==(\S+)", (ROOT / "requirements" / file).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]
