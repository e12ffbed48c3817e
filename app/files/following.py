"""A file while the gateway runs: read again, in a thread, when it changed."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from app.domain.backoff import Backoff
from app.files.complaints import ConfigError

Content = TypeVar("Content")
_Stamp = tuple[int, ...]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FollowedFile(Generic[Content]):
    """``read`` may raise ConfigError. ``name``: in the log. ``has_failed``: the newest content cannot be used.

    ``is_quiet``: another process of this gateway follows the file too, and logs what is wrong with it.
    """

    path: Path
    read: Callable[[Path], Content]
    name: str
    is_quiet: bool = False
    has_failed: bool = False
    _stamp: _Stamp = ()
    _problem: str = ""
    _backoff: Backoff = field(default_factory=Backoff)

    def read_first(self) -> Content:
        """Raises ConfigError."""
        self._stamp = _stamp_of(self.path)
        return self.read(self.path)

    async def read_if_changed(self) -> Content | None:
        """None where nothing changed or the content cannot be used; what failed is retried. Raises nothing."""
        try:
            stamp = await asyncio.to_thread(_stamp_of, self.path)
            if stamp == self._stamp and not (self.has_failed and self._backoff.is_due):
                return None
            if stamp != self._stamp:
                self._backoff.reset()
            content = await asyncio.to_thread(self.read, self.path)
        except ConfigError as exc:
            self._fail(stamp, str(exc))
        except Exception as exc:
            self._fail(stamp, f"{self.path}: {type(exc).__name__}: {exc}", exc)
        else:
            self._stamp, self.has_failed, self._problem = stamp, False, ""
            return content
        return None

    def _fail(self, stamp: _Stamp, problem: str, exc: Exception | None = None) -> None:
        """Logs a problem once, until another takes its place."""
        self._stamp, self.has_failed = stamp, True
        self._backoff.fail()
        if problem != self._problem:
            level = logging.DEBUG if self.is_quiet else logging.ERROR
            text = "%s has changed but is invalid; the old one stays active: %s"
            _log.log(level, text, self.name, problem, exc_info=exc)
        self._problem = problem


def _stamp_of(path: Path) -> _Stamp:
    """Changes with the content, and where a link leads to another file; zeros while the file is away."""
    try:
        status = path.stat()
    except OSError:
        return (0,)
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
