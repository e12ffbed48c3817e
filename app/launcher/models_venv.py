"""The models' Python environment, and the server of the wheel `nvidia-pytriton` inside it.

The gateway creates the environment if its own Python cannot run models. The extra `embedded` has uv for this. A
checkout has its own setup, `deploy/bootstrap.py`.
"""

import json
import os
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from app.launcher.interpreter import REQUEST, Interpreter, choose, inspect, model_candidates, reason_of, refusal
from app.launcher.machine import Machine, ModelEnvironmentUnfit, refusals

_PROBE = """
import importlib.metadata as metadata, json
def found(name):
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
numpy, wheel = found("numpy"), found("nvidia-pytriton")
print(json.dumps([numpy and numpy.version, wheel and str(wheel.locate_file("pytriton/tritonserver"))]))
"""

PACKAGES = "'numpy<2' 'nvidia-pytriton==0.7.0'"
"""The packages that an environment needs to run Triton and Python models, as arguments of pip."""


@dataclass(frozen=True)
class ModelEnvironment:
    """An environment that can run Triton and its Python models; `server` is the wheel's `tritonserver` folder."""

    python: Interpreter
    server: Path

    @classmethod
    def of(cls, venv: Path) -> "ModelEnvironment":
        """Examines `venv`. Raises `ModelEnvironmentUnfit` with a remedy if models cannot run there."""
        python = inspect(venv / "bin" / "python3")
        if python is None:
            raise ModelEnvironmentUnfit(
                f"There is no Python environment for the models in {venv}. In a checkout, `make run` makes one, and so "
                "does `pip install '.[embedded]'` with the next start. Elsewhere, with Python 3.10 to 3.12: "
                f"`python3 -m venv .venv-triton && .venv-triton/bin/pip install {PACKAGES}`."
            )
        if not python.runs_models:
            by_extra = "With `pip install '.[embedded]'` the gateway installs one itself."
            raise ModelEnvironmentUnfit(f"{refusal(python.path)} {by_extra}")
        answer = subprocess.run([str(python.path), "-I", "-c", _PROBE], stdout=subprocess.PIPE, check=True, timeout=30)
        numpy, server = json.loads(answer.stdout)
        problems = []
        if numpy is None:
            problems.append("it has no numpy")
        elif int(numpy.partition(".")[0]) >= 2:
            problems.append(
                f"it has numpy {numpy}, and Triton's Python backend silently corrupts tensors with numpy 2 or newer"
            )
        if server is None:
            problems.append("it does not hold the wheel nvidia-pytriton")
        if problems:
            raise ModelEnvironmentUnfit(
                f"The models' environment of {python.path} is not complete: {', and '.join(problems)}. "
                f"Run `{python.path} -m pip install {PACKAGES}`. In a checkout, `make run` makes an environment "
                "for the models."
            )
        return cls(python, Path(server))

    @property
    def executable(self) -> Path:
        """The `tritonserver` binary."""
        return self.server / "bin" / "tritonserver"

    def link_backends(self, folder: Path) -> None:
        """Creates symbolic links to the wheel's Python backend in `folder`, in the layout that Triton expects."""
        python = folder / "python"
        python.mkdir(parents=True)
        stub = self.server / "python_backend_stubs" / "{}.{}".format(*self.python.version)
        for source in (*(self.server / "backends" / "python").iterdir(), *stub.iterdir()):
            (python / source.name).symlink_to(source)


def is_needed(gateway: Path) -> bool:
    """Whether the environment `gateway` has uv, but its Python cannot run models. False where Triton cannot run."""
    python = inspect(gateway / "bin" / "python3")
    return _path_of_uv().exists() and not (python and python.runs_models) and not refusals(Machine.here())


def create(venv: Path) -> None:
    """Creates `venv` with a Python of this machine or one that uv installs. Raises `ModelEnvironmentUnfit`."""
    paths = model_candidates(os.environ)
    found = choose(paths, inspect, lambda each: each.runs_models)
    python = ["--python", str(found.path)] if found else ["--python", REQUEST, "--managed-python"]
    try:
        if stderr := _stderr_of_uv("venv", *python, str(venv)):
            raise ModelEnvironmentUnfit(f"{refusal(None)}\n{reason_of(stderr)}")
        if stderr := _stderr_of_uv("pip", "install", "--no-deps", "--python", str(venv), "pip", *shlex.split(PACKAGES)):
            raise ModelEnvironmentUnfit(f"The models' environment {venv} could not be installed:\n{stderr}")
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise


def _stderr_of_uv(*arguments: str) -> str | None:
    """Runs uv. Returns None after success."""
    command = [str(_path_of_uv()), *arguments, "--quiet"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip() or "uv failed" if done.returncode else None


def _path_of_uv() -> Path:
    return Path(sysconfig.get_path("scripts")) / "uv"
