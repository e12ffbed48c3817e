"""Checks of the Dockerfile's text, without a build."""

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def stages() -> dict[str, str]:
    """Returns the text of each stage by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def test_hadolint_reports_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-fail", ROOT / "Dockerfile"], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_the_base_image_is_the_first_argument_and_the_gateway_the_last_stage() -> None:
    instructions = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    assert instructions[0].startswith("ARG BASE_IMAGE=")
    assert list(stages())[-1] == "gateway", "a build without a target creates the last stage"


@pytest.mark.parametrize("stage", ["gateway", "triton"])
def test_the_image_runs_as_an_unprivileged_user_without_a_shell_and_has_labels(stage: str) -> None:
    text = stages()[stage]
    user = re.search(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert user is not None
    assert int(user[1]) >= 10001
    assert "RUN" not in text
    assert all(each.startswith("[") for each in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.MULTILINE))
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", text))
    assert {"title", "description", "version", "revision"} <= labels


@pytest.mark.parametrize(("port", "status"), [("0", 1), ("given", 0)])
def test_the_health_check_asks_the_admin_port(port: str, status: int) -> None:
    (found,) = re.findall(r"^HEALTHCHECK .*? CMD (\[.*?\])$", stages()["gateway"], re.MULTILINE | re.DOTALL)
    _, flag, script = json.loads(found.replace("\\\n", ""))
    with HTTPServer(("127.0.0.1", 0), Live) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given = {"GATEWAY_ADMIN_PORT": str(server.server_port) if port == "given" else port}
        done = subprocess.run([sys.executable, flag, script], env=given, capture_output=True, check=False)
        server.shutdown()
    assert done.returncode == status


class Live(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health/live" else 404)
        self.end_headers()


def test_every_package_is_locked_by_its_hash() -> None:
    installs = re.findall(r"pip (?:--python \S+ )?install.*?(?=&&|\n(?! ))", DOCKERFILE, re.DOTALL)
    assert len(installs) == 4
    assert all("--require-hashes" in each or "--no-index" in each for each in installs)


def test_a_pth_file_names_the_folder_of_the_models_packages() -> None:
    """Before Triton 24.11, model processes ignore PYTHONPATH."""
    (folder,) = re.findall(r"--target (\S+)", stages()["triton-packages"])
    lines = re.findall(r'echo "(.+)" > "\$folder/model-packages\.pth"', DOCKERFILE)
    assert lines == [f"import sys; sys.path.insert(0, '{folder}')"]


def test_the_copied_files_match_the_build_context() -> None:
    copied = {
        source.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    included = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert IGNORED[1] == "*"
    assert copied == included
    assert all((ROOT / name).exists() for name in included)


def test_each_optional_package_of_the_image_is_locked_and_known() -> None:
    """The build deletes the lines of a package that is not in EXTRAS."""
    (names,) = re.findall(r"^RUN for extra in (.*); do", stages()["build"], re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    locked = (ROOT / "requirements" / "gateway.txt").read_text()
    (default,) = re.findall(r'^ARG EXTRAS="(.*)"$', stages()["build"], re.MULTILINE)
    assert set(default.split()) == set(names.split())
    for name in names.split():
        assert [re.split("[>=]", each)[0] for each in extras[name]] == [name]
        assert len(re.findall(f"^{name}==", locked, re.MULTILINE)) == 1


def test_packages_without_their_symbols_still_work(tmp_path: Path) -> None:
    """The libraries of compilers, linkers and of tools that change them afterwards: C, C++, Rust and Fortran."""
    names = ("numpy", "numpy.libs", "ml_dtypes", "uvloop", "yaml", "orjson", "_yaml")
    for name in names:
        source = Path(numpy.__file__).parents[1] / name
        if source.exists():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    before = size_of(tmp_path)
    subprocess.run([sys.executable, ROOT / "requirements" / "slim.py", tmp_path], check=True)
    assert size_of(tmp_path) < 0.65 * before
    assert not list(tmp_path.rglob("tests"))
    assert not list(tmp_path.rglob("*.pyi"))
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import ml_dtypes, numpy, orjson, uvloop, yaml
for module in (ml_dtypes, numpy, orjson, uvloop, yaml):
    assert module.__file__.startswith({str(tmp_path)!r}), module
matrix = numpy.random.default_rng(0).random((50, 50))
assert numpy.allclose(numpy.linalg.inv(matrix) @ matrix, numpy.eye(50))
assert numpy.fft.ifft(numpy.fft.fft(matrix)).real.shape == (50, 50)
assert orjson.loads(orjson.dumps(numpy.array([1.5]).astype(ml_dtypes.bfloat16).astype(float).tolist())) == [1.5]
try:
    yaml.load("[", yaml.CSafeLoader)
except yaml.YAMLError:
    pass

async def answer():
    return 7

assert uvloop.run(answer()) == 7
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
