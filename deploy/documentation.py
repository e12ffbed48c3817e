"""Build the documentation site: every page that README.md leads to, with full-text search and without outside assets.

    make docs                                   # into site/
    python -m deploy.documentation FOLDER

The pages are the repository's Markdown files as they are. They are copied to .cache/docs-source first, because
Zensical deletes the folder `.cache` beside its configuration.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from deploy.bootstrap import CACHE, ROOT
from deploy.tool_environment import tool_environment

SOURCE = CACHE / "docs-source"
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")

Nav = list[dict[str, "str | Nav"]]


def main() -> None:
    """Build the site in the folder that the command line names."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    build(target.resolve())
    sys.stdout.write(f"Open {target}/index.html\n")


def build(target: Path, root: Path = ROOT) -> None:
    """Build the site of a checkout. A broken link or anchor ends the program with Zensical's message."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for file in reachable(root / "README.md"):
        copy = SOURCE / "pages" / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    configuration = yaml.safe_load((root / "docs" / "site.yml").read_text())
    configuration |= {"docs_dir": "pages", "site_dir": "site", "nav": navigation(root / "docs")}
    (SOURCE / "mkdocs.yml").write_text(yaml.safe_dump(configuration, sort_keys=False))
    command = [tool_environment("docs") / "zensical", "build", "--strict"]
    status = subprocess.run(command, cwd=SOURCE, check=False).returncode
    if status != 0:
        sys.exit(f"The documentation site was not built (status {status}).")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(SOURCE / "site", target)


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
            pages = [{title.replace("`", ""): os.path.normpath(f"docs/{link}")} for title, link in entries]
            nav.append({heading: pages})
    return nav


if __name__ == "__main__":
    main()
