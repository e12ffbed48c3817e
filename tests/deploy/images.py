"""Builds and runs images without a container daemon: debootstrap, buildah and runc, as root."""

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.toolkit.programs import output_of

ROOT = Path(__file__).parents[2]
PROGRAMS = ("buildah", "debootstrap", "runc")
BASE = "localhost/debian-python"
DEBIAN = "bookworm"


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
