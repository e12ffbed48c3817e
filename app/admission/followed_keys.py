"""The keys in force, which follow the keys file while the gateway runs."""

import logging
import stat
from pathlib import Path

from app.admission.keys import Key, Keyring
from app.admission.keys_file import read_keys
from app.files.following import FollowedFile

_log = logging.getLogger(__name__)


class FollowedKeys:
    """Raises ConfigError if the file cannot be used and no keys are ``known`` to be good."""

    def __init__(self, path: Path, known: Keyring | None = None) -> None:
        self._path = path
        self._file = FollowedFile(path, read_keys, "the file of API keys")
        self.ring = known or self._file.read_first()
        """As the file last was when it could be used."""
        if known is None:
            self._warn_if_public()

    @property
    def reload_failed(self) -> bool:
        """Whether the file was changed to what cannot be used: the keys from before are in force."""
        return self._file.has_failed

    async def follow(self) -> None:
        """Takes the file's new content, if it changed and can be used."""
        ring = await self._file.read_if_changed()
        if ring is not None:
            self.ring = ring
            _log.info("the file of API keys was read", extra={"keys": len(ring.keys)})
            self._warn_if_public()

    def key_of(self, text: bytes, now: float) -> Key:
        """As of ``Keyring``."""
        return self.ring.key_of(text, now)

    def _warn_if_public(self) -> None:
        try:
            mode = self._path.stat().st_mode
        except OSError:
            return
        if mode & stat.S_IROTH:
            _log.warning("every user of this machine may read the file of API keys: chmod o-r %s", self._path)
