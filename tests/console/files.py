"""The files of the page, where the gateway finds them."""

from pathlib import Path

from app.api.openapi import CONSOLE

FOLDERS = [Path(folder) for folder in CONSOLE.all_directories]
"""The console's own folder, and that of the files that all pages share."""
FILES = sorted(path.name for folder in FOLDERS for path in folder.iterdir() if path.is_file())


def path_of(name: str) -> Path:
    (found,) = (folder / name for folder in FOLDERS if (folder / name).is_file())
    return found


def read(name: str) -> str:
    return path_of(name).read_text()
