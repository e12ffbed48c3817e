"""Reads and validates the keys file (``GATEWAY_API_KEYS_FILE``). Error messages never contain values of the file."""

import json
import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, ValidationError

from app.admission.caller import Caller, CallerLimits
from app.admission.keys import PREFIX, Key, Keyring
from app.files.complaints import ConfigError, complaint_at, read_spec
from app.files.document import Lines
from app.files.section import Name, Section

MAX_HASHES = 4
"""Limit for one key. A rotation needs two."""
MAX_PRIORITY = 1000
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{8,}}|[0-9a-fA-F]{{32,}}")
"""Matches text that may be a key or a hash in the wrong field."""

Dialect = Literal["pipelines", "oip", "openai"]


def _checked_hash(text: str) -> str:
    """Raises ValueError."""
    if not _HASH.fullmatch(text):
        raise ValueError("must be the SHA-256 of a key: 64 hexadecimal digits, as `triton-gateway key new` prints them")
    return text


def _checked_id(text: str) -> str:
    """Raises ValueError."""
    if _SECRET.fullmatch(text):
        raise ValueError("looks like a key or a hash, and the log shows ids")
    return text


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _parsed_time(value: Any) -> Any:
    """Accepts a time in quotes too."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise ValueError("must be a time with its zone, such as 2027-01-01T00:00:00Z") from exc


Hashes = Annotated[
    list[Annotated[str, AfterValidator(_checked_hash)]],
    BeforeValidator(_listed),
    Field(min_length=1, max_length=MAX_HASHES),
]
Time = Annotated[AwareDatetime, BeforeValidator(_parsed_time)]


class LimitsSpec(Section):
    in_flight: int | None = Field(None, ge=1)
    queue: int | None = Field(None, ge=0)


class KeySpec(Section):
    id: Annotated[Name, AfterValidator(_checked_id)]
    sha256: Hashes = Field(repr=False)
    pipelines: Annotated[list[Name], Field(min_length=1)] | None = None
    dialects: Annotated[list[Dialect], Field(min_length=1)] | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    limits: LimitsSpec = LimitsSpec()
    expires: Time | None = None
    explain: bool = False

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(map(bytes.fromhex, self.sha256))

    def key(self) -> Key:
        return Key(
            Caller(self.id, self.priority, CallerLimits(self.limits.in_flight, self.limits.queue)),
            self.digests,
            None if self.pipelines is None else frozenset(self.pipelines),
            None if self.dialects is None else frozenset(self.dialects),
            math.inf if self.expires is None else self.expires.timestamp(),
            self.explain,
        )


class KeysSpec(Section):
    keys: list[KeySpec]


def read_keys(path: Path) -> Keyring:
    """Reads the keys file. Raises ConfigError."""
    try:
        spec, lines = read_spec(path, KeysSpec)
        repeated = list(_repeated(path, spec, lines))
        if repeated:
            raise ConfigError("\n".join(repeated))
    except ConfigError as exc:
        raise ConfigError(_SECRET.sub("***", str(exc))) from None
    return Keyring(tuple(each.key() for each in spec.keys))


def _repeated(path: Path, spec: KeysSpec, lines: Lines) -> Iterator[str]:
    """Yields a complaint for each id and each hash that an earlier entry already uses."""
    ids: set[str] = set()
    digests: set[bytes] = set()
    for index, each in enumerate(spec.keys):
        if each.id in ids:
            text = "is the id of an earlier key: to replace a key, give one entry both hashes, `sha256: [old, new]`"
            yield complaint_at(path, lines, ("keys", index, "id"), text)
        if digests.intersection(each.digests) or len(set(each.digests)) < len(each.digests):
            yield complaint_at(path, lines, ("keys", index, "sha256"), "is a hash that an earlier entry already has")
        ids.add(each.id)
        digests.update(each.digests)


def entry_of(key_id: str, sha256: str) -> str:
    """Returns the YAML entry of a new key, to add to the file. Raises ConfigError."""
    try:
        KeySpec(id=key_id, sha256=[sha256])
    except ValidationError as exc:
        raise ConfigError(f"the id is wrong: {exc.errors()[0]['msg'].removeprefix('Value error, ')}") from exc
    is_text = isinstance(yaml.safe_load(key_id), str)
    return f"  - id: {key_id if is_text else json.dumps(key_id)}\n    sha256: {sha256}\n"
