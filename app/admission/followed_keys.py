"""The valid API keys. They are reloaded when the keys file changes."""

import logging
import stat
from pathlib import Path

from app.admission.keys import Key, Keyring
from app.admission.keys_file import read_keys
from app.files.following import FollowedFile

_log = logging.getLogger(__name__)


class FollowedKeys:
    """Reloads the keys file when it changes.

    A worker passes the keys of its supervisor as ``known``. The supervisor also follows the file, and only the
    supervisor logs.
    """

    def __init__(self, path: Path, known: Keyring | None = None) -> None:
        """Reads the file. Raises ConfigError if the file is invalid and ``known`` is None."""
        self._path = path
        self.is_quiet = known is not None
        self._file = FollowedFile(path, read_keys, "the file of API keys", self.is_quiet)
        self.ring = known or self._file.read_first()
        """The keys of the last valid version of the file."""
        self._warn_if_public()

    @property
    def reload_failed(self) -> bool:
        """Whether the current version of the file is invalid, so that the previous keys are still used."""
        return self._file.has_failed

    async def follow(self) -> None:
        """Reloads the file if it changed and is valid."""
        ring = await self._file.read_if_changed()
        if ring is not None:
            self.ring = ring
            if not self.is_quiet:
                _log.info("the file of API keys was reloaded", extra={"keys": len(ring.keys)})
            self._warn_if_public()

    def key_of(self, text: bytes, now: float) -> Key:
        """See :meth:`Keyring.key_of`."""
        return self.ring.key_of(text, now)

    def _warn_if_public(self) -> None:
        try:
            mode = self._path.stat().st_mode
        except OSError:
            return
        if mode & stat.S_IROTH and not self.is_quiet:
            _log.warning("every user of this machine can read the file of API keys; run `chmod o-r %s`", self._path)
