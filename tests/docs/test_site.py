"""The site that ``make docs`` builds, once for all tests, has no broken links and loads no external files."""

import json
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from deploy.bootstrap import CACHE
from deploy.documentation import build, reachable
from tests.conftest import Require
from tests.docs.pages import PAGES, ROOT
from tests.toolkit.environments import locked_environment, once_in


def built_site(require: Require) -> Path:
    try:
        locked_environment("docs", require)
    except SystemExit as stopped:
        require(None, f"the generator of the site cannot be installed here: {stopped}")
    return once_in(CACHE / "docs-site", build)


LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "object": "data"}
"""The attribute whose address a browser loads, by element."""


class Page(HTMLParser):
    """The ids, the links and the loaded files of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(require: Require) -> Path:
    return built_site(require)


@cache
def page_at(path: Path) -> Page:
    return Page(path.read_text())


def pages_of(site: Path) -> list[Path]:
    """Returns every page that was made from Markdown.

    Examples in HTML and the page for unknown addresses are left out.
    """
    pages = [path for path in sorted(site.rglob("*.html")) if not (ROOT / "docs" / path.relative_to(site)).exists()]
    return [path for path in pages if path.name != "404.html"]


def is_broken(page: Path, link: str) -> bool:
    address = urlsplit(link)
    target = file_at(page.parent, address.path) if address.path else page
    return target is None or (bool(address.fragment) and unquote(address.fragment) not in page_at(target).ids)


@cache
def file_at(folder: Path, path: str) -> Path | None:
    """Cached, because every page has the links of the menu."""
    target = (folder / unquote(path)).resolve()
    return target if target.is_file() else None


def test_no_link_of_the_site_is_broken(site: Path) -> None:
    links = [(page, link) for page in pages_of(site) for link in page_at(page).links if "://" not in link]
    assert len(links) > 5_000
    assert [(str(page), link) for page, link in links if is_broken(page, link)] == []


def test_the_site_loads_no_external_files(site: Path) -> None:
    loaded = [(page, address) for page in pages_of(site) for address in page_at(page).loaded]
    assert len(loaded) > 400
    assert [(str(page), address) for page, address in loaded if is_broken(page, address)] == []


def test_the_search_index_has_every_page(site: Path) -> None:
    index = (site / "search.json").read_text()
    found = {item["location"].partition("#")[0] for item in json.loads(index)["items"]}
    assert found >= {str(page.relative_to(site)) for page in pages_of(site)}


def test_every_page_of_docs_is_reachable_from_the_readme() -> None:
    documentation = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert documentation - reachable(ROOT / "README.md") == set()
