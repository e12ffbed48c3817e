"""Checks the API key of each request, and what the key allows: decision 21.

The matched route decides whether a key is needed, never the text of the path.
"""

import time

from app.admission.keys import FollowedKeys, Key
from app.api.exchange import Exchange
from app.core.errors import Forbidden, Unauthenticated, UnknownPipeline
from app.pipelines.catalog import Catalog

_BEARER = b"bearer "
_BEARER_PROTOCOL = b"bearer."
"""Begins the WebSocket subprotocol with the key: pages can set no headers of a WebSocket."""
HINT = "Send `Authorization: Bearer <key>` or `X-API-Key: <key>`."


def hint_of(scope: str) -> str:
    return f"Use another key, or ask an operator to add it to the `{scope}` of this key in the file of API keys."


def key_of(exchange: Exchange, keys: FollowedKeys) -> Key | None:
    """The request's key, also noted on the exchange.

    Raises Unauthenticated if it is not valid, and for several keys: gateway and proxies must not differ on which one
    counts.
    """
    found = set[bytes]()
    for name, value in exchange.scope["headers"]:
        if name == b"authorization":
            found.add(value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else b"")
        elif name == b"x-api-key":
            found.add(value.strip())
        elif name == b"sec-websocket-protocol":
            offered = [each.strip() for each in value.split(b",")]
            found.update(each[len(_BEARER_PROTOCOL) :] for each in offered if each.startswith(_BEARER_PROTOCOL))
    found.discard(b"")
    if len(found) > 1:
        raise Unauthenticated("The request has several API keys.", hint="Send one key, in one header.")
    if not found:
        return None
    key = keys.key_of(found.pop(), time.time())
    exchange.key, exchange.caller, exchange.record.key = key, key.caller, key.caller.id
    return key


def check_pipeline(exchange: Exchange, catalog: Catalog, name: str) -> None:
    """Raises Forbidden, whether the pipeline exists or not, and UnknownPipeline without the names of others.

    Raises UpstreamUnavailable while the pipelines are not known.
    """
    key = exchange.key
    if key is None or key.pipelines is None:
        return
    if not key.allows(name):
        raise Forbidden("This API key does not allow this pipeline.", hint=hint_of("pipelines"))
    catalog.check_known()
    if name not in catalog.entries:
        raise UnknownPipeline("There is no such pipeline.")


def check_model(exchange: Exchange, catalog: Catalog, model: str) -> None:
    """Raises Forbidden, whether the model exists or not."""
    if not allows_model(exchange.key, catalog, model):
        raise Forbidden("This API key does not allow this model.", hint=hint_of("pipelines"))


def allows_model(key: Key | None, catalog: Catalog, model: str) -> bool:
    """Whether a pipeline that the key allows runs the model. A name that no pipeline has is that of a model.

    ``key``: None if no keys are required.
    """
    if key is None or key.pipelines is None:
        return True
    entries = catalog.entries
    return any(model == (entries[name].spec.model if name in entries else name) for name in key.pipelines)
