"""A file while the gateway runs: read again, in a thread, when it or a file that it names has changed."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from app.config.document import ConfigError
from app.core.aio import Backoff
from app.core.files import Stamp, stamp_of

Content = TypeVar("Content")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FollowedFile(Generic[Content]):
    """``read`` may raise ConfigError. ``name``: in the log. ``has_failed``: the newest content cannot be used.

    ``others_of``: the files that ``read`` read because the content names them, with their stamps before that.
    """

    path: Path
    read: Callable[[Path], Content]
    name: str
    others_of: Callable[[Content], Mapping[Path, Stamp]] = lambda _: {}
    has_failed: bool = False
    _stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    _problem: str = ""
    _backoff: Backoff = field(default_factory=Backoff)

    def read_first(self) -> Content:
        """Raises ConfigError."""
        stamp, content = stamp_of(self.path), self.read(self.path)
        self._stamps = {**self.others_of(content), self.path: stamp}
        return content

    async def read_if_changed(self) -> Content | None:
        """Looks in a thread."""
        return await asyncio.to_thread(self.look)

    def look(self) -> Content | None:
        """None where nothing changed or the content cannot be used; what failed is retried. Raises nothing."""
        stamps = {path: stamp_of(path) for path in (self.path, *self._stamps)}
        if stamps == self._stamps and not (self.has_failed and self._backoff.is_due):
            return None
        if stamps != self._stamps:
            self._backoff.reset()
        try:
            content = self.read(self.path)
        except ConfigError as exc:
            self._fail(stamps, str(exc))
        except Exception as exc:
            self._fail(stamps, f"{self.path}: {type(exc).__name__}: {exc}", exc)
        else:
            self._stamps = {**self.others_of(content), self.path: stamps[self.path]}
            self.has_failed, self._problem = False, ""
            return content
        return None

    def _fail(self, stamps: Mapping[Path, Stamp], problem: str, exc: Exception | None = None) -> None:
        """Logs a problem once, until another takes its place."""
        self._stamps, self.has_failed = stamps, True
        self._backoff.fail()
        if problem != self._problem:
            text = "%s has changed but is invalid; the old one stays active: %s"
            _log.error(text, self.name, problem, exc_info=exc)
        self._problem = problem
