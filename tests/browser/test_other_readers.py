"""Other clients for Server-Sent Events read the same events as the project's own reader."""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Require
from tests.toolkit.environments import npm_environment
from tests.toolkit.events import checked, parsed

NPM = Path(__file__).parent / "npm"
TRICKY = ["48656c6c6f", "f0", "9f", "98", "80", "e280a8", "0d0a", "0a0a", "3a20", "c3a4c3b6", "646174613a20"]
"""In hexadecimal: a word, an emoji in four pieces, U+2028, CR LF, an empty line, a colon, umlauts, a field name."""


@pytest.fixture(scope="session")
def readers(require: Require) -> Path:
    """The folder with the script and its locked packages."""
    return npm_environment("stream-readers", NPM, require)


@pytest.fixture
def stream_url(client: httpx.Client) -> str:
    script = json.dumps({"outputs": 2 * len(TRICKY), "texts": TRICKY, "interval_s": 0.01})
    started = client.post("/v1/streams", json={"pipeline": "scripted_kept", "inputs": {"script": script}})
    assert started.status_code == 201, started.text
    return str(client.base_url.join(started.headers["Location"]))


def ours(url: str) -> list[tuple[str, str, Any]]:
    return [(str(event.id), event.name, event.data) for event in checked(parsed(httpx.get(url).content.decode()))]


def test_the_npm_packages_read_the_same_events(readers: Path, stream_url: str) -> None:
    answer = subprocess.run(
        ["node", "read.mjs", stream_url], cwd=readers, capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, answer.stderr
    expected = ours(stream_url)
    for name, events in json.loads(answer.stdout).items():
        assert [(id_, event, json.loads(data)) for id_, event, data in events] == expected, name
    assert "".join(data["text"] for _, _, data in expected[:-1]) == bytes.fromhex("".join(TRICKY * 2)).decode()
