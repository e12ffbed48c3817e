"""The tutorials work as printed: files, commands and answers, with the real Triton."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Require
from tests.docs.pages import ROOT, blocks_of
from tests.docs.walkthrough import Reader, blocks_after

TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.usefixtures("models_venv")
def test_own_ensemble_works_as_printed(tmp_path: Path, require: Require) -> None:
    require(shutil.which("curl"), "there is no curl")
    folder = tmp_path / "colours"
    folder.mkdir()
    reader = Reader(folder)
    try:
        reader.follow(blocks_after(TUTORIALS / "own-ensemble.md", "A Python model"))
    finally:
        statuses = list(reader.leave())
    assert statuses == [0] * 5


def test_the_browser_tutorial_shows_its_page() -> None:
    page = (TUTORIALS / "llm_in_a_browser" / "write.html").read_text()
    shown = [text for language, text in blocks_of(TUTORIALS / "llm-in-a-browser.md") if language == "js"]
    assert len(shown) > 3
    assert [text for text in shown if text not in page] == []
