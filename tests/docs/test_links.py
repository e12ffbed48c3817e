"""Every link within the repository leads somewhere."""

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, links_of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_finds_it(page: Path) -> None:
    targets = [link.partition("#")[0] for link in links_of(page) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []
