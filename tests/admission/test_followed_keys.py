"""The keys are reloaded when their file changes; an invalid file changes nothing."""

import logging
import os
from pathlib import Path

import pytest

from app.admission.keys import FollowedKeys
from app.config.document import ConfigError
from app.core.errors import Unauthenticated
from app.routes import DIALECTS
from tests.toolkit.keys import entry, key_text, write_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.yaml", entry("a"))


def has(keys: FollowedKeys, key_id: str) -> bool:
    try:
        return keys.key_of(key_text(key_id).encode(), 0.0).caller.id == key_id
    except Unauthenticated:
        return False


def replace(path: Path, text: str | None) -> None:
    path.unlink()
    if text is not None:
        path.write_text(text)


async def test_a_valid_change_is_applied(path: Path) -> None:
    keys = FollowedKeys(path, DIALECTS)
    write_keys(path, entry("b"))
    await keys.follow()
    assert (has(keys, "a"), has(keys, "b"), keys.reload_failed) == (False, True, False)


@pytest.mark.parametrize(
    "broken", ["", "keys: [", "keys:\n  - id: a\n", None], ids=["empty", "invalid yaml", "missing hash", "deleted"]
)
async def test_a_broken_file_keeps_the_keys(path: Path, broken: str | None, caplog: pytest.LogCaptureFixture) -> None:
    keys = FollowedKeys(path, DIALECTS)
    replace(path, broken)
    for _ in range(3):
        await keys.follow()
    assert (has(keys, "a"), keys.reload_failed) == (True, True)
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1
    write_keys(path, entry("a"), entry("b"))
    await keys.follow()
    assert (has(keys, "b"), keys.reload_failed) == (True, False)


async def test_a_secret_replaced_by_kubernetes_is_reloaded(tmp_path: Path) -> None:
    """Kubernetes replaces a symbolic link to a folder; the old and the new file may have the same size and time."""
    for number, key_id in enumerate("ab"):
        (tmp_path / f"data{number}").mkdir()
        write_keys(tmp_path / f"data{number}" / "keys.yaml", entry(key_id))
        os.utime(tmp_path / f"data{number}" / "keys.yaml", ns=(1, 1))
    (tmp_path / "data").symlink_to("data0")
    (tmp_path / "keys.yaml").symlink_to("data/keys.yaml")
    keys = FollowedKeys(tmp_path / "keys.yaml", DIALECTS)
    (tmp_path / "swap").symlink_to("data1")
    (tmp_path / "swap").rename(tmp_path / "data")
    await keys.follow()
    assert (has(keys, "a"), has(keys, "b")) == (False, True)


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_world_readable_file_causes_a_warning(
    path: Path, mode: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    path.chmod(mode)
    FollowedKeys(path, DIALECTS)
    assert len(caplog.records) == warnings


def test_an_invalid_file_at_start_is_an_error(path: Path) -> None:
    path.write_text("keys: [")
    with pytest.raises(ConfigError):
        FollowedKeys(path, DIALECTS)
