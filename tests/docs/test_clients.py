"""The table of clients has the tested versions and names the tests."""

import json
import re

import pytest

from tests.docs.pages import ROOT, Row, rows_under

LOCKS = {"kserve": "kserve", "litellm": "litellm", "langchain-openai": "langchain", "pydantic-ai-slim": "pydantic-ai"}
"""Lock file in requirements/ by package; all other packages are in dev.txt."""
NPM_LOCK = ROOT / "tests" / "live" / "npm_openai" / "package-lock.json"
ROWS = rows_under("docs/how-to/migration.md", "Clients")


def locked_version(client: str) -> str:
    if "JavaScript" in client:
        version: str = json.loads(NPM_LOCK.read_text())["packages"]["node_modules/openai"]["version"]
        return version
    package = client.split("`")[1].split(".", maxsplit=1)[0]
    lock = (ROOT / "requirements" / f"{LOCKS.get(package, 'dev')}.txt").read_text()
    return re.findall(rf"^{package}==(\S+)", lock, re.M)[0]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_client_has_its_locked_version_and_its_test(row: Row) -> None:
    client, version, _called, test = row
    assert version == locked_version(client)
    path = ROOT / test.split("`")[1]
    assert path.exists()
    assert ("(full)" in test) == ("pytestmark = pytest.mark.full" in path.read_text())
