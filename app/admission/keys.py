"""API keys: which key a request has, what the key allows, and who its caller is. Only hashes of keys are kept."""

import math
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from hmac import compare_digest

from app.admission.caller import Caller
from app.domain.errors import Unauthenticated

PREFIX = "tgw_"
"""By which a person, or a scanner for secrets, recognizes a key."""
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the keys file. ``None`` for pipelines or dialects: all of them."""

    caller: Caller
    digests: tuple[bytes, ...] = field(repr=False)
    """SHA-256 of each text that is accepted: two while callers change from an old text to a new one."""
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
    """All keys."""

    keys: tuple[Key, ...]

    @cached_property
    def _by_digest(self) -> tuple[tuple[bytes, Key], ...]:
        return tuple((digest, key) for key in self.keys for digest in key.digests)

    def key_of(self, text: bytes, now: float) -> Key:
        """The key with this text. ``now``: seconds since the epoch. Raises Unauthenticated.

        The text is compared with every key, in constant time, so that the time says nothing about any of them.
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
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """As the keys file has it. A slow hash would add nothing: a key has too many random bits to be guessed."""
    return sha256(key.encode()).hexdigest()
