"""JSON answers by orjson: numpy arrays are lists, and NaN and infinity are ``null``."""

from collections.abc import Awaitable
from typing import Any

import orjson
from starlette.responses import Response

from app.api.exchange import Exchange, Header

_JSON: Header = (b"content-type", b"application/json")


class JsonResponse(Response):
    """The answer of a route of FastAPI."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _rendered(content)


def send_json(exchange: Exchange, content: Any, *headers: Header) -> Awaitable[None]:
    """The answer of a short route, with the status 200."""
    body = _rendered(content)
    return exchange.answer((_JSON, (b"content-length", b"%d" % len(body)), *headers), body)


def _rendered(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
