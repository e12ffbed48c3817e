"""Checks whether this machine can run the wheel `nvidia-pytriton`, and defines the errors of the embedded Triton.

The setup imports this file before it installs anything, so it uses only the standard library and is compatible with
Python 3.9.

EmbeddedTritonError
├── MachineUnfit
├── ModelEnvironmentUnfit
├── RepositoryUnservable
├── TritonPortTaken
└── StartFailed
    ├── StartCrashed
    └── StartTimedOut
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ("x86_64", "aarch64")
OLDEST_GLIBC = (2, 35)
GLIBCXX = "GLIBCXX_3.4.30"
_SIDECAR = "run Triton as a separate container instead (`triton-gateway serve --triton HOST:PORT`)"


@dataclass(frozen=True)
class Machine:
    """The relevant facts. `glibc`: None with another C library. `has_glibcxx`: whether GLIBCXX_3.4.30 is available."""

    system: str
    architecture: str
    glibc: tuple[int, int] | None
    has_glibcxx: bool

    @classmethod
    def here(cls) -> Machine:
        """The machine this process runs on."""
        return cls(platform.system(), platform.machine(), _glibc(), _has_glibcxx())


def refusals(machine: Machine) -> list[str]:
    """Returns a message with a remedy for each requirement that `machine` does not meet."""
    if machine.system != "Linux":
        return [f"The embedded Triton needs Linux, this is {machine.system}: use a Linux container, or {_SIDECAR}."]
    found = []
    if machine.architecture not in ARCHITECTURES:
        built_for = " or ".join(ARCHITECTURES)
        found.append(f"The embedded Triton is built for {built_for}, this is {machine.architecture}: {_SIDECAR}.")
    if machine.glibc is None or machine.glibc < OLDEST_GLIBC:
        glibc = "another C library" if machine.glibc is None else "glibc {}.{}".format(*machine.glibc)
        way_out = f"use Debian 12, Ubuntu 22.04 or newer, or {_SIDECAR}"
        text = "The embedded Triton needs glibc {}.{} or newer, this is {}: {}."
        found.append(text.format(*OLDEST_GLIBC, glibc, way_out))
    if not machine.has_glibcxx:
        found.append(
            f"The embedded Triton needs a libstdc++ with {GLIBCXX} (GCC 12 or newer): install it "
            f"(Debian and Ubuntu: `apt-get install libstdc++6`), or {_SIDECAR}."
        )
    return found


def _glibc() -> tuple[int, int] | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = version.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else None
    return None


def _has_glibcxx() -> bool:
    # The dynamic loader chooses the libstdc++, so query the loader instead of searching folders.
    try:
        ctypes.CDLL("libstdc++.so.6")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        loaded = next(line.split(maxsplit=5)[5] for line in maps.splitlines() if "libstdc++.so" in line)
        return GLIBCXX.encode() + b"\0" in Path(loaded).read_bytes()
    except (OSError, StopIteration):
        return False


class EmbeddedTritonError(Exception):
    """The embedded Triton cannot run. The message is for the user at the terminal."""


class MachineUnfit(EmbeddedTritonError):
    """The wheel does not support the operating system or its libraries."""


class ModelEnvironmentUnfit(EmbeddedTritonError):
    """The models' Python environment is incomplete, or its numpy version corrupts tensors."""


class RepositoryUnservable(EmbeddedTritonError):
    """The model repository is missing, broken, or needs a backend that the wheel does not have."""


class TritonPortTaken(EmbeddedTritonError):
    """Another process uses a port that is configured for Triton."""


class StartFailed(EmbeddedTritonError):
    """Triton exited before it was ready, usually because a model failed to load."""


class StartCrashed(StartFailed):
    """A signal ended Triton before it was ready, and no model had failed to load."""


class StartTimedOut(StartFailed):
    """Triton was not ready before the timeout."""
