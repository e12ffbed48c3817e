"""Reports limits of requests that are smaller than the number of workers: together the workers exceed them."""

import logging
from collections.abc import Iterator

from app.admission.followed_keys import FollowedKeys
from app.pipelines.catalog import Catalog

_log = logging.getLogger(__name__)


class ShareCheck:
    """Logs each of these limits once. ``workers``: 1 for a process whose supervisor logs them."""

    def __init__(self, catalog: Catalog, keys: FollowedKeys | None, workers: int) -> None:
        self._catalog = catalog
        self._keys = keys
        self._workers = workers
        self._logged: set[tuple[str, int]] = set()

    def run(self) -> None:
        for limit, total in self._limits():
            if total < self._workers and (limit, total) not in self._logged:
                self._logged.add((limit, total))
                text = "%s is %d, but each of the %d workers runs at least 1 request: together they run up to %d"
                _log.warning(text, limit, total, self._workers, self._workers)

    def _limits(self) -> Iterator[tuple[str, int]]:
        for name, entry in self._catalog.entries.items():
            limits = entry.spec.limits
            for key in ("in_flight", "per_key") if limits is not None else ():
                if (total := getattr(limits, key)) is not None:
                    yield f"limits.{key} of the pipeline '{name}'", total
        for each in () if self._keys is None else self._keys.ring.keys:
            if each.caller.limits.in_flight is not None:
                yield f"limits.in_flight of the API key '{each.caller.id}'", each.caller.limits.in_flight
