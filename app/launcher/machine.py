"""What the embedded Triton needs: a machine that can run the wheel `nvidia-pytriton`, and a Python for the models.

Finds a Python 3.10 to 3.12 with a shared libpython, or installs one with uv. The setup imports this file before it
installs anything, so it uses only the standard library and is compatible with Python 3.9.
"""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
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
        name, version = platform.libc_ver()
        major, _, minor = version.partition(".")
        glibc = (int(major), int(minor.partition(".")[0])) if name == "glibc" else None
        return cls(platform.system(), platform.machine(), glibc, _has_glibcxx())


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


class RepositoryUnservable(EmbeddedTritonError):
    """The model repository is missing, broken, or needs a backend that the wheel does not have."""


class StartCrashed(EmbeddedTritonError):
    """A signal ended Triton before it was ready, and no model had failed to load."""


OLDEST = (3, 10)
NEWEST = (3, 12)
NAMES = ("python3.12", "python3.11", "python3.10")
"""The interpreters that may be able to run the models, best first."""

# The folder of libpython differs between builds (pyenv, Debian, standalone builds), and a statically linked interpreter
# may have a shared libpython too. For an interpreter without one, INSTSONAME is a `.a` file or empty.
_PROBE = """
import ctypes, json, os, sys, sysconfig
from importlib.metadata import distributions
name = sysconfig.get_config_var("INSTSONAME") or ""
libdir, multiarch = sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("MULTIARCH") or ""
folders = [libdir, os.path.join(libdir, multiarch), os.path.join(sys.base_prefix, "lib")]
found = [folder for folder in folders if ".so" in name and os.path.isfile(os.path.join(folder, name))]
if not found and ".so" in name:
    try:
        ctypes.CDLL(name)
        found = [""]
    except OSError:
        pass
numpy, wheel = (next(iter(distributions(name=each)), None) for each in ("numpy", "nvidia-pytriton"))
server = wheel and str(wheel.locate_file("pytriton/tritonserver"))
print(json.dumps([sys.version_info[:2], found[0] if found else None, numpy and numpy.version, server]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python on this machine.

    `library_folder` is the folder of its shared libpython: "" if the system's loader finds it, None without one.
    `numpy` is the version of numpy, and `server` the `tritonserver` folder of the wheel, if they are installed.
    """

    path: Path
    version: tuple[int, int]
    library_folder: str | None
    numpy: str | None = None
    server: str | None = None

    @property
    def runs_models(self) -> bool:
        """Whether the wheel and numpy below 2 support this version, and libpython is shared."""
        return OLDEST <= self.version <= NEWEST and self.library_folder is not None


def inspect(path: Path) -> Interpreter | None:
    """Queries the interpreter at `path`. Returns None if it does not exist or fails."""
    try:
        answer = subprocess.run(
            [str(path), "-I", "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version, *others = json.loads(answer.stdout)
    return Interpreter(path, (version[0], version[1]), *others)


def candidates(names: Iterable[str], environment: Mapping[str, str]) -> list[Path]:
    """Returns interpreters to try: the current one, those with these `names` on PATH, then those of pyenv."""
    on_path = [shutil.which(name, path=environment.get("PATH")) for name in (*names, "python3")]
    pyenv = Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    versions = [folder for name in names for folder in sorted(pyenv.glob(name[len("python") :] + ".*"), reverse=True)]
    # Not `sys.executable`: it may belong to an environment that the setup is about to recreate.
    found = [
        getattr(sys, "_base_executable", sys.executable),
        *filter(None, on_path),
        *(str(folder / "bin" / "python3") for folder in versions),
    ]
    return [Path(path) for path in dict.fromkeys(found)]


def choose(paths: Iterable[Path], suits: Callable[[Interpreter], bool] | None = None) -> Interpreter | None:
    """Returns the first interpreter of `paths` that can be queried and is suitable: by default, for the models."""
    answers = (inspect(path) for path in paths)
    return next((each for each in answers if each and (suits(each) if suits else each.runs_models)), None)


def refusal(unfit: Path | None) -> str:
    """Returns the message that `unfit`, or every Python, cannot run the models, with the remedies for this machine."""
    lead = f"{unfit} cannot" if unfit else "No Python on this machine can"
    by_apt = ""
    if shutil.which("apt-cache") is not None:  # the newest Python that apt knows and that can run models, if any
        names = [f"libpython3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
        command = ["apt-cache", "show", "--no-all-versions", *names]
        shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.decode()
        library = next((name for name in names if f"Package: {name}" in shown.splitlines()), None)
        by_apt = f"`apt-get install {library[len('lib') :]} {library}`, or " if library else ""
    return (
        f"{lead} run the models: they need Python 3.10 to 3.12 with a shared libpython. To install one: "
        f"{by_apt}with pyenv `PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.12`."
    )


REQUEST = ">=3.11,<3.13"
"""The versions that can run both the models and the gateway, in the syntax of uv, which installs the newest."""


class PythonUnavailable(Exception):
    """uv could not install a Python, or must not install one. The message is the reason."""


def paths_in(folder: Path) -> list[Path]:
    """Returns the Pythons that `install` put into `folder`."""
    return sorted(folder.glob("cpython-3.*.*/bin/python3"), reverse=True)


def install(uv: Path, folder: Path, environment: Mapping[str, str]) -> Interpreter:
    """Installs a CPython with a shared libpython in `folder`. Raises `PythonUnavailable`.

    uv's own variables in `environment` select its address (`UV_PYTHON_INSTALL_MIRROR`) or forbid the installation
    (`UV_PYTHON_DOWNLOADS=never`, `UV_OFFLINE`).
    """
    require_permission(environment)
    command = [str(uv), "python", "install", "--no-bin", "--no-progress", "--install-dir", str(folder), REQUEST]
    done = subprocess.run(command, env=dict(environment), stderr=subprocess.PIPE, text=True, check=False)
    found = choose(paths_in(folder))
    if done.returncode != 0 or found is None:
        raise PythonUnavailable(reason_of(done.stderr))
    return found


def require_permission(environment: Mapping[str, str]) -> None:
    """Raises `PythonUnavailable` if a variable in `environment` forbids uv to install a Python."""
    if environment.get("UV_PYTHON_DOWNLOADS") == "never":
        raise PythonUnavailable("The setup does not install one, because UV_PYTHON_DOWNLOADS=never is set.")
    if environment.get("UV_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise PythonUnavailable("The setup does not install one, because UV_OFFLINE is set.")


def reason_of(stderr: str) -> str:
    """Returns the reason of an installation that failed with these lines of uv."""
    lines = [f"  {line.strip()}" for line in stderr.splitlines() if line.strip()]
    return "\n".join(["The setup could not install one with uv (UV_PYTHON_INSTALL_MIRROR can name a mirror):", *lines])
