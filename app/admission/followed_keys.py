"""The keys in force, which follow the keys file while the gateway runs."""

import logging
import stat
from pathlib import Path

from app.admission.keys import Key, Keyring
from app.admission.keys_file import read_keys
from app.files.following import FollowedFile

_log = logging.getLogger(__name__)


class FollowedKeys:
    """``known``: the keys of a worker's supervisor, which follows the file too, and logs what happens to it."""

    def __init__(self, path: Path, known: Keyring | None = None) -> None:
        """Raises ConfigError if the file cannot be used and no keys are known."""
        self._path = path
        self.is_quiet = known is not None
        self._file = FollowedFile(path, read_keys, "the file of API keys", self.is_quiet)
        self.ring = known or self._file.read_first()
        """As the file last was when it could be used."""
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
            if not self.is_quiet:
                _log.info("the file of API keys was read again", extra={"keys": len(ring.keys)})
            self._warn_if_public()

    def key_of(self, text: bytes, now: float) -> Key:
        """As of ``Keyring``."""
        return self.ring.key_of(text, now)

    def _warn_if_public(self) -> None:
        try:
            mode = self._path.stat().st_mode
        except OSError:
            return
        if mode & stat.S_IROTH and not self.is_quiet:
            _log.warning("every user of this machine may read the file of API keys: chmod o-r %s", self._path)
