"""Model processes of a real Triton find the packages that the Dockerfile adds to the image of Triton."""

import os
import re
import subprocess
from pathlib import Path

from app.launcher.launch import EmbeddedOptions
from tests.toolkit.processes import running_triton

ROOT = Path(__file__).parents[2]
CONFIG = """name: "probe"
backend: "python"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
MODEL = """import importlib.util, pathlib

class TritonPythonModel:
    def initialize(self, args):
        found = [name for name in ("by_pth_file", "by_pythonpath") if importlib.util.find_spec(name)]
        pathlib.Path("REPORT").write_text(" ".join(found))

    def execute(self, requests): ...
"""


def environment_like(venv: Path, folder: Path, pth_line: str) -> Path:
    """Makes an environment with the packages of ``venv`` and a .pth file that contains ``pth_line``."""
    subprocess.run([venv / "bin" / "python3", "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (packages,) = venv.glob("lib/python3*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    (site / "model-packages.pth").write_text(f"{pth_line}\n")
    return folder


def test_model_processes_read_the_pth_file_but_not_pythonpath(models_venv: Path, tmp_path: Path) -> None:
    """Before Triton 24.11, model processes ignore PYTHONPATH. The wheel contains Triton 24.10."""
    (line,) = re.findall(r'echo "(.+)" > "\$folder/model-packages\.pth"', (ROOT / "Dockerfile").read_text())
    for module in ("by_pth_file", "by_pythonpath"):
        (tmp_path / module).mkdir()
        (tmp_path / module / f"{module}.py").touch()
    venv = environment_like(
        models_venv, tmp_path / "venv", line.replace("/opt/model-packages", str(tmp_path / "by_pth_file"))
    )
    model = tmp_path / "repository" / "probe"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "1" / "model.py").write_text(MODEL.replace("REPORT", str(tmp_path / "report")))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "by_pythonpath")}
    with running_triton(EmbeddedOptions(model.parent, venv, environment=environment)):
        assert (tmp_path / "report").read_text() == "by_pth_file"
