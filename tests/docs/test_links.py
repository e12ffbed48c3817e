"""Every link within the repository points to an existing file and heading."""

import re
from functools import cache
from pathlib import Path

import pytest

from deploy.documentation import links_of
from tests.docs.pages import ALL_PAGES, ROOT

PAGE_BY_TOPIC = {
    "install": "how-to/install.md",
    "compose": "how-to/install.md",
    "port": "how-to/install.md",
    "kubernetes": "how-to/install-kubernetes.md",
    "release notes": "../CHANGELOG.md",
    "sizing": "how-to/scaling.md",
    "alerts": "how-to/alerts.md",
    "api keys": "how-to/keys.md",
    "error by its message": "how-to/troubleshooting.md",
    "react": "how-to/react.md",
    "vllm": "reference/models.md",
    "command line": "reference/command-line.md",
}
"""What users look for, in lower case, and the page that the index must link in the same line."""


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


def test_the_links_are_found() -> None:
    assert len([link for page in ALL_PAGES for link in links_of(page)]) > 300


@pytest.mark.parametrize("topic", PAGE_BY_TOPIC)
def test_the_index_names_a_topic_beside_its_page(topic: str) -> None:
    lines = (ROOT / "docs" / "README.md").read_text().splitlines()
    assert [line for line in lines if f"]({PAGE_BY_TOPIC[topic]})" in line and topic in line.lower()]


def test_one_of_two_indices_links_each_page_once() -> None:
    """README.md is for users, contributors.md for contributors. benchmarks/README.md links the pages of benchmarks."""
    docs = ROOT / "docs"
    links = links_of(docs / "README.md") + links_of(docs / "contributors.md")
    linked = [link for link in links if not link.startswith(("#", ".."))]
    indexed = [page for page in docs.rglob("*.md") if page.parent.name != "benchmarks"]
    assert len(linked) == len(set(linked))
    pages = {str(page.relative_to(docs)) for page in indexed} - {"README.md"}
    assert set(linked) == pages | {"benchmarks/README.md"}
