"""Builds the two images on the Python of Debian, and runs the image of the gateway with the session's Triton."""

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.conftest import Require
from tests.deploy.images import ROOT, Builder, lacking, running
from tests.toolkit.processes import GatewayProcess, free_ports, wait_until_ready

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SHELLS = ("sh", "bash", "dash")


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
