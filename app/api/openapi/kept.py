"""Keeps rendered OpenAPI documents, because building one takes milliseconds on the event loop."""

from collections.abc import Callable, Sequence
from operator import is_

from app.admission.keys import Key
from app.domain.json_schema import Schema
from app.domain.json_text import json_of
from app.pipelines.catalog import Catalog

MAX_KEPT_BYTES = 16 * 1024 * 1024
"""Limit of all kept documents together; the newest one is always kept."""

_Names = frozenset[str] | None
_Scope = tuple[_Names, _Names]
"""The pipelines and the dialects that a key allows; None: all of them."""


class KeptDocuments:
    """The documents of the catalog as it is now, one for each scope of keys."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._names: Sequence[str] = ()
        self._objects: Sequence[object] = ()
        """With the names, the parts of the catalog that the kept documents describe."""
        self._documents: dict[_Scope, bytes] = {}

    def document(self, key: Key | None, build: Callable[[], Schema]) -> bytes:
        """Returns the JSON for callers with this key, which ``build`` describes. Drops the least recently used ones."""
        self._drop_outdated()
        scope = (None, None) if key is None else (key.pipelines, key.dialects)
        document = self._documents.pop(scope, None) or json_of(build())
        self._documents[scope] = document
        while len(self._documents) > 1 and sum(map(len, self._documents.values())) > MAX_KEPT_BYTES:
            del self._documents[next(iter(self._documents))]
        return document

    def _drop_outdated(self) -> None:
        names, objects = _names_in(self._catalog), _objects_in(self._catalog)
        if names != self._names or len(objects) != len(self._objects) or not all(map(is_, objects, self._objects)):
            self._names, self._objects = names, objects
            self._documents.clear()


def _names_in(catalog: Catalog) -> Sequence[str]:
    return [*catalog.entries, *catalog.exposed.names]


def _objects_in(catalog: Catalog) -> Sequence[object]:
    """What a document describes. A change replaces an object, so comparing the identities is enough, and cheap."""
    pipelines = [part for entry in catalog.entries.values() for part in (entry.spec, entry.pipeline)]
    return [*pipelines, *catalog.exposed.configs]
