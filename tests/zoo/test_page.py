"""The page about the kinds of models has the table of the zoo."""

from tests.docs.pages import ROOT
from tests.zoo.page import table


def test_the_page_has_the_table_of_the_kinds() -> None:
    assert table() in (ROOT / "docs/reference/models.md").read_text(), "`python -m tests.zoo.page` prints the table"
