"""Every link within the repository points to an existing file and heading."""

import re
from functools import cache
from pathlib import Path

import pytest

from deploy.documentation import links_of
from tests.docs.pages import ALL_PAGES, ROOT

HEADINGS_IN_TWO_CLICKS = {
    "how-to/install.md#with-pip": "install",
    "how-to/install.md#compose": "compose",
    "reference/command-line.md#command-line": "command line",
    "reference/models.md#kinds-of-models": "vLLM",
    "how-to/react.md#react-and-typescript": "React",
    "../CHANGELOG.md#changelog": "release notes",
    "how-to/install.md#change-the-port": "changing the port",
    "how-to/scaling.md#what-limits-a-pod": "sizing",
    "how-to/alerts.md#alerts": "alerts",
    "how-to/keys.md#api-keys": "keys",
    "how-to/troubleshooting.md#in-an-answer": "an error by its message",
}
"""Where a reader of the index must arrive with at most two links, and what the reader looks for."""


def slug_of(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text.strip()).replace(" ", "-")


@cache
def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    return {slug_of(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def is_broken(page: Path, link: str) -> bool:
    address, _, anchor = link.partition("#")
    target = page.parent / address if address else page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in anchors_of(target.resolve())


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_points_to_a_file_and_a_heading(page: Path) -> None:
    assert [link for link in links_of(page) if "://" not in link and is_broken(page, link)] == []


@pytest.mark.parametrize("heading", HEADINGS_IN_TWO_CLICKS, ids=HEADINGS_IN_TWO_CLICKS.get)
def test_a_heading_is_two_clicks_from_the_index(heading: str) -> None:
    first = targets_of(ROOT / "docs" / "README.md")
    page, _, anchor = heading.partition("#")
    target = ((ROOT / "docs" / page).resolve(), anchor)
    assert target in first.union(*(targets_of(page) for page, _ in first if page.suffix == ".md"))


def targets_of(page: Path) -> set[tuple[Path, str]]:
    """Returns the file and the heading of each link; without an anchor, the first heading of the file."""
    found = set()
    for link in links_of(page):
        address, _, anchor = link.partition("#")
        target = (page.parent / address).resolve() if address else page
        if "://" not in link and target.suffix == ".md":
            found.add((target, anchor or first_heading_of(target)))
    return found


@cache
def first_heading_of(page: Path) -> str:
    return slug_of(page.read_text().partition("\n")[0].lstrip("# "))


def test_one_of_two_indices_links_each_page_once() -> None:
    """README.md is for users, contributors.md for contributors. benchmarks/README.md links the pages of benchmarks."""
    docs = ROOT / "docs"
    links = links_of(docs / "README.md") + links_of(docs / "contributors.md")
    linked = [link for link in links if not link.startswith(("#", ".."))]
    indexed = [page for page in docs.rglob("*.md") if page.parent.name != "benchmarks"]
    assert len(linked) == len(set(linked))
    pages = {str(page.relative_to(docs)) for page in indexed} - {"README.md"}
    assert set(linked) == pages | {"benchmarks/README.md"}
