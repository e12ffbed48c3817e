"""Reports names in the scopes of API keys that this gateway does not serve: a misspelled name allows nothing."""

import logging

from app.admission.followed_keys import FollowedKeys
from app.domain.nearest import nearest
from app.pipelines.catalog import Catalog

_log = logging.getLogger(__name__)


class ScopeCheck:
    """Logs each unknown name once. Without ``gateway.yaml`` nothing is reported, because models come and go."""

    def __init__(self, keys: FollowedKeys, catalog: Catalog) -> None:
        self._keys = keys
        self._catalog = catalog
        self._logged: set[tuple[str, str]] = set()

    def run(self) -> None:
        if self._catalog.file is None or self._keys.is_quiet:
            return
        served = [*self._catalog.entries, *self._catalog.exposed.names]
        for key in self._keys.ring.keys:
            for name in sorted((key.pipelines or set()) - set(served)):
                if (key.caller.id, name) not in self._logged:
                    self._logged.add((key.caller.id, name))
                    text = "the API key '%s' allows '%s', which this gateway does not serve%s"
                    _log.warning(text, key.caller.id, name, nearest(name, served))
