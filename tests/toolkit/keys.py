"""Keys files with keys that the tests know."""

import json
from pathlib import Path
from typing import Any

from app.admission.keys import NO_OWN_LIMITS, CallerLimits, Key, hash_of


def key_text(key_id: str) -> str:
    """Returns the key of this id, which is the same in every test."""
    return f"tgw_{key_id}_{'0123456789abcdef' * 2}"


def entry(key_id: str, **more: Any) -> dict[str, Any]:
    return {"id": key_id, "sha256": hash_of(key_text(key_id)), **more}


def key_with(key_id: str, priority: int = 0, limits: CallerLimits = NO_OWN_LIMITS) -> Key:
    return Key(id=key_id, sha256=[hash_of(key_text(key_id))], priority=priority, limits=limits)


def write_keys(path: Path, *entries: dict[str, Any]) -> Path:
    """Writes the file as JSON, which is valid YAML, and replaces it atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"keys": entries}))
    new.chmod(0o600)
    return new.rename(path)


def bearer(key_id: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_text(key_id)}"}
