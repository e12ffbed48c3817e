"""Builds the two images on the Python of Debian, and runs the image of the gateway with the session's Triton.

Without a container daemon: debootstrap, buildah and runc, as root.
"""

import ast
import json
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.toolkit.processes import GatewayProcess, free_ports, wait_until_ready
from tests.toolkit.programs import output_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROGRAMS = ("buildah", "debootstrap", "runc")
BASE = "localhost/debian-python"
DEBIAN = "bookworm"
SHELLS = ("sh", "bash", "dash")


def lacking() -> str:
    """Returns why this machine cannot build an image, or an empty string."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}: `make system-packages` installs them"
    return "" if os.geteuid() == 0 else "building an image here needs root"


def debian_tree() -> Path:
    """Returns a folder with Debian and Python, unpacked once below .cache."""
    tree = ROOT / ".cache" / "images" / DEBIAN
    if not (tree / ".whole").exists():
        shutil.rmtree(tree, ignore_errors=True)
        tree.parent.mkdir(parents=True, exist_ok=True)
        packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, DEBIAN, tree], check=True, capture_output=True)
        (tree / ".whole").touch()
    return tree


class Builder:
    """buildah with separate storage in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.options = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def buildah(self, *arguments: str | Path) -> str:
        """Returns buildah's output. Raises AssertionError with the output if buildah fails."""
        command = ["buildah", *self.options, *map(str, arguments)]
        return output_of(command, environment=os.environ | {"BUILDAH_ISOLATION": "chroot"}, within_s=3600).strip()

    def make_base(self) -> None:
        """Builds the image BASE. It contains this machine's certificates, for a package index behind a proxy."""
        trusted = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, debian_tree(), "/")
        if trusted:
            self.buildah("copy", "--quiet", container, trusted, "/etc/ssl/certs/ca-certificates.crt")
        self.buildah("config", "--env", "PIP_CERT=/etc/ssl/certs/ca-certificates.crt", container)
        self.buildah("commit", "--quiet", "--rm", container, BASE)

    def build(self, target: str) -> str:
        """Builds a target of the Dockerfile with BASE as base image. Returns the image's name."""
        bases = ("--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", f"TRITON_BASE_IMAGE={BASE}")
        self.buildah("bud", "--pull-never", *bases, "--target", target, "--tag", target, ROOT)
        return f"localhost/{target}"

    def config(self, image: str) -> dict[str, Any]:
        """Returns the image's configuration in the format of the Open Container Initiative."""
        inspected: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))
        config: dict[str, Any] = inspected["OCIv1"]["config"]
        return config

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """Yields a writable copy of the image's file system."""
        container = self.buildah("from", "--pull-never", image)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("umount", container)
            self.buildah("rm", container)

    def remove_all(self) -> None:
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")


@contextmanager
def running(
    rootfs: Path, config: dict[str, Any], settings: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the image's command in a container: read-only, no capabilities, the host's network; log in ``folder``.

    At the end of the block the process gets SIGTERM.
    """
    folder.mkdir()
    _write_bundle(rootfs, config, settings, folder)
    state, name = ["--root", str(folder / "state")], f"image-{os.getpid()}"
    with (folder / "log").open("wb") as log:
        command = ["runc", *state, "run", "--bundle", str(folder), name]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        subprocess.run(["runc", *state, "kill", name, "TERM"], check=False)
        try:
            process.wait(30)
        finally:
            subprocess.run(["runc", *state, "delete", "--force", name], check=False)


def _write_bundle(rootfs: Path, config: dict[str, Any], settings: dict[str, str], folder: Path) -> None:
    subprocess.run(["runc", "spec", "--bundle", folder], check=True)
    bundle = json.loads((folder / "config.json").read_text())
    user, _, group = config["User"].partition(":")
    bundle["root"] = {"path": str(rootfs), "readonly": True}
    bundle["process"] |= {
        "terminal": False,
        "user": {"uid": int(user), "gid": int(group)},
        "args": [*config["Entrypoint"], *config["Cmd"]],
        "cwd": config["WorkingDir"],
        "env": [*config["Env"], *(f"{name}={value}" for name, value in settings.items())],
        "capabilities": {kind: [] for kind in bundle["process"]["capabilities"]},
        "noNewPrivileges": True,
    }
    bundle["linux"]["namespaces"] = [each for each in bundle["linux"]["namespaces"] if each["type"] != "network"]
    (folder / "config.json").write_text(json.dumps(bundle))


@pytest.fixture(scope="module")
def builder(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    require(not lacking(), lacking())
    folder = tmp_path_factory.mktemp("images")
    made = Builder(folder)
    made.make_base()
    yield made
    made.remove_all()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image(builder: Builder) -> str:
    return builder.build("gateway")


def test_the_image_serves_read_only_without_root_or_a_shell(
    builder: Builder, image: str, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    port, admin_port = free_ports(2)
    settings = {
        "GATEWAY_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "GATEWAY_ADMIN_PORT": str(admin_port),
        "GATEWAY_TRITON_URL": triton.grpc_url,
        "GATEWAY_CONFIG": "gateway.yaml",
    }
    folder = tmp_path / "bundle"
    with builder.mounted(image) as rootfs:
        for shell in SHELLS:
            (rootfs / "bin" / shell).unlink()
        with running(rootfs, builder.config(image), settings, folder) as process:
            urls = (f"http://127.0.0.1:{each}" for each in (port, admin_port))
            gateway = GatewayProcess(process, *urls, folder / "log")
            wait_until_ready(gateway)
            sign = (ROOT / "samples" / "sign.png").read_bytes()
            answer = httpx.post(f"{gateway.url}/v1/pipelines/ocr", files={"image": sign}, timeout=30)
            assert answer.json()["texts"]
            streamed = httpx.post(f"{gateway.url}/v1/pipelines/write/stream", json={"prompt": "The", "max_tokens": 4})
            assert "event: done" in streamed.text
        assert process.returncode == 0, gateway.log


def test_the_image_has_user_labels_and_ports_but_no_pip_and_no_writable_files(builder: Builder, image: str) -> None:
    config = builder.config(image)
    assert config["User"] == "10001:10001"
    assert config["Labels"]["org.opencontainers.image.title"] == "triton-gateway"
    assert set(config["ExposedPorts"]) == {"8080/tcp", "8081/tcp"}
    with builder.mounted(image) as rootfs:
        assert not list(rootfs.glob("opt/triton-gateway/**/pip"))
        assert not (rootfs / "build").exists()
        own = [*(rootfs / "opt").rglob("*"), *(rootfs / "app").rglob("*")]
        writable = [each for each in own if not each.is_symlink() and each.stat().st_mode & 0o022]
        assert writable == []
        assert {each.stat().st_uid for each in own if not each.is_symlink()} == {0}


def test_the_build_context_has_only_the_listed_files(builder: Builder, tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM scratch\nCOPY . /context/\n")
    builder.buildah("bud", "--file", dockerfile, "--tag", "context", ROOT)
    with builder.mounted("localhost/context") as rootfs:
        inside = {each.name for each in (rootfs / "context").iterdir()}
        listed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        assert inside == listed
        assert not list(rootfs.rglob("__pycache__"))


def imported() -> set[str]:
    """Returns the third-party packages that the reference models and ``model_kit`` import."""
    sources = [*(ROOT / "triton_models").rglob("*.py"), *(ROOT / "model_kit" / "src").rglob("*.py")]
    names = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module).partition(".")[0])
    local = {source.stem for source in sources} | {"triton_python_backend_utils"}
    return names - local - sys.stdlib_module_names


def test_the_models_find_their_packages_in_the_triton_image(builder: Builder) -> None:
    """The image is built on Debian, because the base image of NVIDIA is not available to the tests."""
    image = builder.build("triton")
    container = builder.buildah("from", "--pull-never", image)
    names = sorted(imported())
    assert {"model_kit", "numpy"} <= set(names)
    script = f"import numpy, {', '.join(names)}; print(numpy.__version__.split('.')[0])"
    isolated = ("python3", "-I", "-c", script)
    assert builder.buildah("run", container, "--", *isolated) == "1", "the packages depend on PYTHONPATH"
    with builder.mounted(image) as rootfs:
        models = {each.name for each in (rootfs / "models").iterdir() if each.is_dir()}
        assert models == {each.name for each in (ROOT / "triton_models").iterdir() if each.is_dir()}
        assert not list((rootfs / "opt" / "model-packages").glob("*pytriton*"))
    assert builder.config(image)["Cmd"][0] == "tritonserver"
