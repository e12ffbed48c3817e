"""Sets up a checkout for `make run` and `make test`: `.venv` for the gateway, `.venv-triton` for Triton and its models.

Standard library only, Python 3.9 or newer. Writes only inside the checkout, including caches. A second run
with the same lock files is a no-op. Packages that a user adds to an environment stay.

    python3 deploy/bootstrap.py            # what runs
    python3 deploy/bootstrap.py --tests    # and the tools of the tests

The gateway needs Python 3.11 to 3.14, the models Python 3.10 to 3.12 with a shared libpython. If this machine has no
such Python, uv installs one in `.cache/python`. `MODELS_PYTHON` selects a Python for the models.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Of this checkout, which is not installed yet.
from app.launcher import machine  # noqa: E402
from app.launcher.machine import Interpreter, PythonUnavailable  # noqa: E402

OLDEST, NEWEST = (3, 11), (3, 14)
CACHE = ROOT / ".cache"
MANAGED_PYTHONS = CACHE / "python"
REQUIREMENTS = ROOT / "requirements"
# Settings of pip and uv (an index, a proxy) are inherited, but their caches are inside the checkout.
ENVIRONMENT = {
    **os.environ,
    "PIP_CACHE_DIR": str(CACHE / "pip"),
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_CACHE_DIR": str(CACHE / "uv"),
    "TMPDIR": str(CACHE / "tmp"),
}
# Only `install_python` installs a Python, not a command that finds none.
TOOL_ENVIRONMENT = {**ENVIRONMENT, "UV_PYTHON_DOWNLOADS": "never"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the files that decide what is in it."""

    folder: Path
    locks: tuple[Path, ...]
    others: tuple[Path, ...]
    chosen: str | None = None
    size_mb: int = 0
    """About what it takes on disk."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python3"

    @property
    def stamp(self) -> Path:
        """Written last, so an environment without this file is incomplete."""
        return self.folder / ".set-up"

    def fingerprint(self) -> str:
        """A hash of the lock files, the chosen interpreter, and the folder, because environments cannot be moved."""
        digest = hashlib.sha256(f"{self.folder} {self.chosen}".encode())
        for path in (*self.locks, *self.others):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def is_current(self) -> bool:
        return self.python.exists() and self.stamp.is_file() and self.stamp.read_text() == self.fingerprint()


PROJECT = (REQUIREMENTS / "bootstrap.txt", ROOT / "pyproject.toml")
GATEWAY = Environment(ROOT / ".venv", (REQUIREMENTS / "gateway.txt", REQUIREMENTS / "build.txt"), PROJECT, size_mb=235)
WITH_TESTS = replace(GATEWAY, locks=(REQUIREMENTS / "dev.txt",), size_mb=760)
"""The same folder with the tools of the tests too."""
MODELS = Environment(
    ROOT / ".venv-triton",
    (REQUIREMENTS / "triton.txt",),
    (REQUIREMENTS / "bootstrap.txt",),
    os.environ.get("MODELS_PYTHON"),
    size_mb=565,
)
UV = GATEWAY.folder / "bin" / "uv"
UV_ALONE = CACHE / "setup"
INSTALL_UV = ("-m", "pip", "install", "--quiet", "--require-hashes", "-r", REQUIREMENTS / "bootstrap.txt")


def main(*, with_tests: bool) -> None:
    """Checks the machine, then updates both environments."""
    wanted = WITH_TESTS if with_tests else GATEWAY
    with only_one_at_a_time():
        is_current = wanted.is_current() or WITH_TESTS.is_current()
        if is_current and MODELS.is_current():
            return
        require_fit_machine()
        gateway_python, models_python = find_gateway_python(), find_models_python()
        if not is_current:
            set_up_gateway(wanted, gateway_python)
        if not MODELS.is_current():
            set_up_models(models_python)


@contextmanager
def only_one_at_a_time() -> Iterator[None]:
    (CACHE / "tmp").mkdir(parents=True, exist_ok=True)
    with (CACHE / "set-up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def require_fit_machine() -> None:
    refusals = machine.refusals(machine.Machine.here())
    if refusals:
        sys.exit("\n".join(refusals))


def find_gateway_python() -> Interpreter:
    names = ("python3.13", "python3.14", "python3.12", "python3.11")
    paths = [*machine.candidates(names, outside_checkout()), *machine.paths_in(MANAGED_PYTHONS)]
    require_venv(paths)
    return machine.choose(paths, can_run_gateway) or install_python(
        "No Python on this machine can run the gateway: it needs Python 3.11 to 3.14. To name one that is not on PATH: "
        "`make run PYTHON=/path/to/python3.12`."
    )


def find_models_python() -> Interpreter:
    override = Path(MODELS.chosen) if MODELS.chosen else None
    here = [*machine.candidates(machine.NAMES, outside_checkout()), *machine.paths_in(MANAGED_PYTHONS)]
    found = machine.choose([override] if override else here)
    if found is None and override:
        sys.exit(machine.refusal(override))
    return found or install_python(
        f"{machine.refusal(None)} To name one that is not on PATH: `MODELS_PYTHON=/path/to/python3.12 make run`."
    )


def install_python(refusal: str) -> Interpreter:
    """Installs a Python for the gateway and the models. Exits with `refusal` and the reason if it cannot."""
    try:
        machine.require_permission(os.environ)
        uv = UV if UV.exists() else install_uv()
        say(f"Installing a Python in {MANAGED_PYTHONS.relative_to(ROOT)}")
        return machine.install(uv, MANAGED_PYTHONS, ENVIRONMENT)
    except PythonUnavailable as exc:
        sys.exit(f"{refusal}\n{exc}")


def install_uv() -> Path:
    """Installs uv in an environment of its own, because there is no Python for `.venv` yet. Returns its path."""
    python = require_venv(machine.candidates((), outside_checkout()))
    run(python.path, "-m", "venv", "--clear", UV_ALONE)
    run(UV_ALONE / "bin" / "python3", *INSTALL_UV)
    return UV_ALONE / "bin" / "uv"


def require_venv(paths: list[Path]) -> Interpreter:
    """Returns the first Python of `paths` that can make an environment; its version does not matter."""
    found = machine.choose(paths, can_make_environments)
    return found or sys.exit(
        "The setup needs a Python with venv and ensurepip (Debian and Ubuntu: `apt-get install python3-venv`), or name "
        "one: `make run PYTHON=/path/to/python3.12`."
    )


def outside_checkout() -> dict[str, str]:
    """Returns the environment variables with a PATH without this checkout's `.venv`, which may be activated."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return {**os.environ, "PATH": os.pathsep.join(each for each in folders if not each.startswith(f"{ROOT}{os.sep}"))}


def can_run_gateway(found: Interpreter) -> bool:
    return OLDEST <= found.version <= NEWEST and can_make_environments(found)


def can_make_environments(found: Interpreter) -> bool:
    return subprocess.run([str(found.path), "-I", "-c", "import ensurepip, venv"], check=False).returncode == 0


def set_up_gateway(environment: Environment, python: Interpreter) -> None:
    with being_made(environment, python):
        if not UV.exists():
            run(environment.python, *INSTALL_UV)
            run(UV, "pip", "uninstall", "--quiet", "--python", environment.python, "pip", "setuptools")
        install(environment)
        command = ("pip", "install", "--python", environment.python, "--no-deps")
        run(UV, *command, "--no-build-isolation", "--editable", ROOT)


def set_up_models(python: Interpreter) -> None:
    with being_made(MODELS, python, "--without-pip"):
        install(MODELS)
        site_packages = next(MODELS.folder.glob("lib/python3.*/site-packages"))
        (site_packages / "model_kit.pth").write_text(f"{ROOT / 'model_kit' / 'src'}\n")


@contextmanager
def being_made(environment: Environment, python: Interpreter, *options: str) -> Iterator[None]:
    """Creates the environment, or updates the packages of a complete one. Writes the stamp after success."""
    fingerprint = environment.fingerprint()
    size = f" (about {environment.size_mb} MB)" if environment.size_mb else ""
    say(f"Setting up {environment.folder.name} with Python {'.'.join(map(str, python.version))}{size}")
    if not is_whole(environment, python):
        shutil.rmtree(environment.folder, ignore_errors=True)
        run(python.path, "-m", "venv", *options, environment.folder)
    environment.stamp.unlink(missing_ok=True)
    yield
    environment.stamp.write_text(fingerprint)


def is_whole(environment: Environment, python: Interpreter) -> bool:
    if not environment.stamp.is_file():
        return False
    current = machine.inspect(environment.python)
    return current is not None and current.version == python.version


def install(environment: Environment) -> None:
    """Installs the locked versions. Other packages stay, because a user may have added them."""
    files = [word for lock in environment.locks for word in ("--requirement", lock)]
    run(UV, "pip", "install", "--python", environment.python, "--no-deps", "--require-hashes", *files)


def run(*command: str | Path) -> None:
    status = subprocess.run([str(word) for word in command], cwd=ROOT, env=TOOL_ENVIRONMENT, check=False).returncode
    if status != 0:
        line = " ".join(map(str, command))
        sys.exit(f"The setup stopped because this command failed (status {status}); the next run continues:\n  {line}")


def say(message: str) -> None:
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(with_tests="--tests" in sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
