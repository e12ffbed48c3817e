"""API keys: what a key allows, the caller whom it identifies, and the file of keys (``GATEWAY_API_KEYS_FILE``).

The file has hashes of the keys, and is read again when it changes. Error messages never contain values of the file.
"""

import asyncio
import json
import logging
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from functools import cached_property, partial
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, ValidationError

from app.config.document import ConfigError, FollowedFile, Lines, Name, Section, complaint_at, read_spec
from app.core.errors import Unauthenticated
from app.core.text import nearest


class CallerLimits(Section):
    """The limits of one caller. None: no limit for this caller; the pipeline's limits still apply."""

    in_flight: int | None = Field(None, ge=1)
    """Requests and streams that run at the same time."""
    queue: int | None = Field(None, ge=0)
    """Requests that wait at the same time."""
    websockets: int | None = Field(None, ge=1)
    """Open WebSockets. None: half of the connections of the gateway."""
    sessions: int | None = Field(None, ge=1)
    """Open sessions. None: half of the places of each model."""


NO_OWN_LIMITS = CallerLimits()


PREFIX = "tgw_"
"""Lets people and secret scanners recognize a key."""
_KEY_BYTES = 32


def new_key() -> str:
    """Returns a new key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """Returns the hash for the keys file. A slow hash is not necessary, because 256 random bits cannot be guessed."""
    return sha256(key.encode()).hexdigest()


MAX_HASHES = 4
"""Limit for one key. A rotation needs two."""
MAX_PRIORITY = 1000
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{8,}}|[0-9a-fA-F]{{32,}}")
"""Matches text that may be a key or a hash in the wrong field."""


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


def _parsed_time(value: Any) -> Any:
    """Accepts a time in quotes too."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise ValueError("must be a time with its zone, such as 2027-01-01T00:00:00Z") from exc


Hashes = Annotated[
    list[Annotated[str, AfterValidator(_checked_hash)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(min_length=1, max_length=MAX_HASHES),
]
Time = Annotated[AwareDatetime, BeforeValidator(_parsed_time)]


class Key(Section):
    """A caller: one entry of the keys file. ``pipelines`` and ``dialects`` are None if the key allows all of them.

    Callers with a higher ``priority`` go first; callers with the same priority take turns.
    """

    id: Annotated[Name, AfterValidator(_checked_id)]
    sha256: Hashes = Field(repr=False)
    """The hashes of the accepted keys. There are two during a rotation from an old key to a new one."""
    pipelines: Annotated[list[Name], Field(min_length=1)] | None = None
    dialects: Annotated[list[Name], Field(min_length=1)] | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    limits: CallerLimits = NO_OWN_LIMITS
    expires: Time | None = None
    explain: bool = False

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(map(bytes.fromhex, self.sha256))

    def allows(self, pipeline: str) -> bool:
        return self.pipelines is None or pipeline in self.pipelines

    def speaks(self, dialect: str) -> bool:
        return self.dialects is None or dialect in self.dialects


ANYONE = Key.model_construct(id="", sha256=[])
"""The key of a request without one, which allows all, as where no keys are required."""


class KeysSpec(Section):
    keys: list[Key]


def read_keys(path: Path, dialects: Collection[str]) -> Sequence[Key]:
    """Reads the keys file. ``dialects``: the names that the gateway knows. Raises ConfigError."""
    try:
        spec, lines = read_spec(path, KeysSpec)
        if complaints := list(_complaints(path, spec, lines, dialects)):
            raise ConfigError("\n".join(complaints))
    except ConfigError as exc:
        shown = str(path)
        raise ConfigError(shown.join(_SECRET.sub("***", part) for part in str(exc).split(shown))) from None
    return spec.keys


def _complaints(path: Path, spec: KeysSpec, lines: Lines, dialects: Collection[str]) -> Iterator[str]:
    """About unknown dialects, and about each id and each hash that an earlier entry already uses."""
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
        for place, name in enumerate(each.dialects or ()):
            if name not in dialects:
                text = f"is wrong: not an allowed value{nearest(name, dialects)}"
                yield complaint_at(path, lines, ("keys", index, "dialects", place), text)


def entry_of(key_id: str, sha256: str) -> str:
    """Returns the YAML entry of a new key, to add to the file. Raises ConfigError."""
    try:
        Key(id=key_id, sha256=[sha256])
    except ValidationError as exc:
        text = exc.errors()[0]["msg"].removeprefix("Value error, ")
        if exc.errors()[0]["type"] == "string_pattern_mismatch":
            text = "an id has letters, digits, '_', '.' and '-', at most 128, and begins with a letter, a digit or '_'"
        raise ConfigError(f"the id is wrong: {text}") from exc
    is_text = isinstance(yaml.safe_load(key_id), str)
    return f"  - id: {key_id if is_text else json.dumps(key_id)}\n    sha256: {sha256}\n"


_log = logging.getLogger(__name__)


class FollowedKeys(FollowedFile[Sequence[Key]]):
    """Reloads the keys file when it changes."""

    def __init__(self, path: Path, dialects: Collection[str]) -> None:
        """Reads the file. Raises ConfigError if the file is invalid."""
        super().__init__(path, partial(read_keys, dialects=dialects), "the file of API keys")
        self.keys = self.read_first()
        """The keys of the last valid version of the file."""
        self._warn_if_public()

    async def follow(self) -> None:
        """Reloads the file if it changed and is valid."""
        keys = await asyncio.to_thread(self.look)
        if keys is not None:
            self.keys = keys
            _log.info("the file of API keys was reloaded", extra={"keys": len(keys)})
            self._warn_if_public()

    def key_of(self, text: bytes, now: float) -> Key:
        """Returns the key with this text. ``now``: seconds since the epoch. Raises Unauthenticated.

        The text is compared with every key in constant time, so that the response time reveals nothing about the keys.
        """
        digest, found = sha256(text).digest(), None
        for key in self.keys:
            for known in key.digests:
                if compare_digest(known, digest):
                    found = key
        if found is None:
            raise Unauthenticated("The API key is not valid.")
        if found.expires is not None and now >= found.expires.timestamp():
            raise Unauthenticated("The API key has expired.")
        return found

    def _warn_if_public(self) -> None:
        try:
            mode = self.path.stat().st_mode
        except OSError:
            return
        if mode & stat.S_IROTH:
            _log.warning("every user of this machine can read the file of API keys; run `chmod o-r %s`", self.path)
