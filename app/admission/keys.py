"""API keys: identify a request's key, what it allows, and its caller. Only hashes of keys are stored."""

import math
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from hmac import compare_digest

from app.admission.caller import Caller
from app.domain.errors import Unauthenticated

PREFIX = "tgw_"
"""Lets people and secret scanners recognize a key."""
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the keys file. ``pipelines`` and ``dialects`` are None if the key allows all of them."""

    caller: Caller
    digests: tuple[bytes, ...] = field(repr=False)
    """SHA-256 of each accepted key. There are two during a rotation from an old key to a new one."""
    pipelines: frozenset[str] | None = None
    dialects: frozenset[str] | None = None
    expires: float = math.inf
    """Seconds since the epoch."""
    explain: bool = False

    def allows(self, pipeline: str) -> bool:
        return self.pipelines is None or pipeline in self.pipelines

    def speaks(self, dialect: str) -> bool:
        return self.dialects is None or dialect in self.dialects


@dataclass(frozen=True)
class Keyring:
    """All keys of the keys file."""

    keys: tuple[Key, ...]

    @cached_property
    def _by_digest(self) -> tuple[tuple[bytes, Key], ...]:
        return tuple((digest, key) for key in self.keys for digest in key.digests)

    def key_of(self, text: bytes, now: float) -> Key:
        """Returns the key with this text. ``now``: seconds since the epoch. Raises Unauthenticated.

        The text is compared with every key in constant time, so that the response time reveals nothing about the keys.
        """
        digest, found = sha256(text).digest(), None
        for known, key in self._by_digest:
            if compare_digest(known, digest):
                found = key
        if found is None:
            raise Unauthenticated("The API key is not valid.")
        if now >= found.expires:
            raise Unauthenticated("The API key has expired.")
        return found


def new_key() -> str:
    """Returns a new key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """Returns the hash for the keys file. A slow hash is not necessary, because 256 random bits cannot be guessed."""
    return sha256(key.encode()).hexdigest()
