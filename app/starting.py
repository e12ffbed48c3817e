"""``triton-gateway init``: a small working model repository with its gateway.yaml."""

import shlex
import shutil
from pathlib import Path

STARTER = Path(__file__).with_name("starter")


class FolderTaken(Exception):
    """The folder is not empty, or cannot be written."""


def write_starter(folder: Path) -> None:
    """Copies the starter into a new or empty folder. Raises FolderTaken."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FolderTaken(f"{folder} already exists and is not empty: name a new folder, nothing was written.")
        shutil.copytree(STARTER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as exc:
        raise FolderTaken(f"{folder} cannot be written: {exc.strerror or exc}: name a new folder.") from exc


def next_steps(folder: Path) -> str:
    return "\n".join(
        [
            f"{folder} has four models, gateway.yaml and README.md. Next:",
            f"  triton-gateway check {shlex.quote(str(folder))}",
            f"  triton-gateway serve --embedded --models {shlex.quote(str(folder))}",
        ]
    )
