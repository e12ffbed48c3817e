"""``triton-gateway init``: its output, and its errors."""

import shlex
from pathlib import Path

import pytest

from app.cli import main


def test_the_starter_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models"
    assert main(["init", str(folder)]) == 0
    assert f"triton-gateway serve --embedded --models {shlex.quote(str(folder))}" in capsys.readouterr().out
    assert main(["check", str(folder), "--strict"]) == 0
    assert capsys.readouterr().out == "4 models, 3 pipelines: no findings\n"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("README.md", "clean_text", "count_words", "gateway.yaml", "stream_words", "text_report")
    ]


def test_the_next_steps_quote_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my models"
    assert main(["init", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"  triton-gateway serve --embedded --models '{folder}'\n")


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "gateway.yaml").is_file()


def test_a_folder_with_files_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["init", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"triton-gateway: {tmp_path} already exists and is not empty: name a new folder, nothing was written.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
