"""Which Python can run the models: 3.10 to 3.12 with a shared libpython, which Triton's stub processes load.

Standard library only, and it runs on Python 3.9: the set-up imports this file before anything is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST = (3, 10)
NEWEST = (3, 12)

# Where libpython lies differs between builds (pyenv, Debian, standalone builds), and a statically linked interpreter
# may still have one beside it; an interpreter without any names a `.a` file or nothing.
_PROBE = """
import ctypes, json, os, sys, sysconfig
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
print(json.dumps([sys.version_info[:2], found[0] if found else None]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python on this machine.

    `library_folder` holds its shared libpython: "" where the system's loader finds it by itself, None without one.
    """

    path: Path
    version: tuple[int, int]
    library_folder: str | None

    @property
    def runs_models(self) -> bool:
        """True for a Python whose stub the wheel ships, numpy below 2 supports, and libpython is shared."""
        return OLDEST <= self.version <= NEWEST and self.library_folder is not None


Inspect = Callable[[Path], "Interpreter | None"]


def inspect(path: Path) -> Interpreter | None:
    """Ask the interpreter at `path` about itself; None where there is none, or it does not answer."""
    try:
        answer = subprocess.run(
            [str(path), "-I", "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version, library_folder = json.loads(answer.stdout)
    return Interpreter(path, (version[0], version[1]), library_folder)


def candidates(names: Iterable[str], environment: Mapping[str, str]) -> list[Path]:
    """Interpreters worth asking, best first: this one, those called `names` on PATH, then pyenv's."""
    on_path = [shutil.which(name, path=environment.get("PATH")) for name in (*names, "python3")]
    pyenv = Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    versions = [folder for name in names for folder in sorted(pyenv.glob(name[len("python") :] + ".*"), reverse=True)]
    # Not `sys.executable`: that may be of an environment which is about to be made anew.
    found = [
        getattr(sys, "_base_executable", sys.executable),
        *filter(None, on_path),
        *(str(folder / "bin" / "python3") for folder in versions),
    ]
    return [Path(path) for path in dict.fromkeys(found)]


def model_candidates(environment: Mapping[str, str]) -> list[Path]:
    """Interpreters that may run the models, best first."""
    return candidates(("python3.12", "python3.11", "python3.10"), environment)


def choose(paths: Iterable[Path], inspect: Inspect, suits: Callable[[Interpreter], bool]) -> Interpreter | None:
    """The first of `paths` that answers and suits."""
    answers = (inspect(path) for path in paths)
    return next((found for found in answers if found is not None and suits(found)), None)


def refusal(override: Path | None) -> str:
    """What to tell a person on whose machine no interpreter can run the models."""
    lead = f"{override} cannot run the models" if override else "No Python on this machine can run the models"
    return (
        f"{lead}: they need Python 3.10 to 3.12 with a shared libpython. Install one (Debian and Ubuntu: "
        "`apt-get install python3 libpython3-dev`; pyenv: `PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.12`) "
        "and, if it is not on PATH, name it: `MODELS_PYTHON=/path/to/python3.12 make run`."
    )
