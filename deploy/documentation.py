"""Build the documentation site: every page that README.md leads to, with full-text search and without outside assets.

    make docs                                   # into app/site/, which the gateway serves at /docs/
    python -m deploy.documentation FOLDER

The pages are the repository's Markdown files. They are copied to .cache/docs-source first, because Zensical deletes the
folder `.cache` beside its configuration. The pages in docs/ are those of the site's root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import yaml

from deploy.bootstrap import CACHE, ROOT
from deploy.tool_environment import tool_environment

SOURCE = CACHE / "docs-source"
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
SHOWN = (".md", ".html", ".json", ".png", ".svg")
"""What a browser shows. It would download the other files, so they become texts."""

Nav = list[dict[str, "str | Nav"]]


def main() -> None:
    """Build the site in the folder that the command line names."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "app" / "site"
    build(target.resolve())
    sys.stdout.write(f"Open {target}/index.html\n")


def build(target: Path, root: Path = ROOT) -> None:
    """Build the site of a checkout. A broken link or anchor ends the program with Zensical's message."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for file in reachable(root / "README.md"):
        copy = SOURCE / "pages" / place(file, root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            copy.write_text(moved(file, root))
        else:
            shutil.copyfile(file, copy)
    configuration = yaml.safe_load((root / "docs" / "site.yml").read_text())
    configuration |= {"docs_dir": "pages", "site_dir": "site", "nav": navigation(root / "docs")}
    (SOURCE / "mkdocs.yml").write_text(yaml.safe_dump(configuration, sort_keys=False))
    command = [tool_environment("docs") / "zensical", "build", "--strict"]
    status = subprocess.run(command, cwd=SOURCE, check=False).returncode
    if status != 0:
        sys.exit(f"The documentation site was not built (status {status}).")
    for page in (SOURCE / "site").rglob("*.html"):
        without_inline_scripts(page, SOURCE / "site")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(SOURCE / "site", target)


def place(file: Path, root: Path) -> Path:
    """The path of a file of the repository within the site."""
    path = file.relative_to(root)
    if path == Path("docs/README.md"):
        return Path("contents.md")
    if path.suffix not in SHOWN:
        path = path.with_name(f"{path.name}.txt")
    if path.parts[0] == "docs":
        return path.relative_to("docs")
    return path if len(path.parts) == 1 else "repository" / path


def moved(page: Path, root: Path) -> str:
    """The text of a page whose links fit the places of the site."""

    def with_place(link: re.Match[str]) -> str:
        target, mark, anchor = (link[1] or link[2]).partition("#")
        file = Path(os.path.normpath(page.parent / target))
        if not target or "://" in target or not file.is_file():
            return link[0]
        path = os.path.relpath(place(file, root), place(page, root).parent)
        return link[0].replace(target + mark + anchor, path + mark + anchor)

    return LINK.sub(with_place, page.read_text())


def without_inline_scripts(page: Path, site: Path) -> None:
    """Move the scripts of a page to files, because the gateway's Content-Security-Policy forbids inline scripts."""

    def as_file(script: re.Match[str]) -> str:
        file = site / "assets" / "javascripts" / f"inline.{sha256(script[1].encode()).hexdigest()[:8]}.js"
        file.write_text(script[1])
        return f'<script src="{os.path.relpath(file, page.parent)}"></script>'

    page.write_text(re.sub(r"<script>(.*?)</script>", as_file, page.read_text(), flags=re.S))


def reachable(start: Path) -> set[Path]:
    """Every file of the repository to which links lead from a page, directly or over other pages."""
    found, waiting = set[Path](), [start]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += files_linked_by(file) if file.suffix == ".md" else []
    return found


def files_linked_by(page: Path) -> Iterator[Path]:
    for link in links_of(page):
        target = Path(os.path.normpath(page.parent / link.partition("#")[0]))
        if "://" not in link and not link.startswith("#") and target.is_file():
            yield target


def links_of(page: Path) -> list[str]:
    """The targets of the links and images of a page, except those in code."""
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    return [markdown or html for markdown, html in LINK.findall(text)]


def navigation(docs: Path) -> Nav:
    """The menu of the site: the sections of docs/README.md with the first link of each entry."""
    nav: Nav = [{"Overview": "README.md"}]
    for section in (docs / "README.md").read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        entries = re.findall(r"^- \[([^]]+)\]\(([^)]+)\)", text, re.M)
        if entries:
            pages = [
                {title.replace("`", ""): str(place(Path(os.path.normpath(docs / link)), docs.parent))}
                for title, link in entries
            ]
            nav.append({heading: pages})
    return nav


if __name__ == "__main__":
    main()
