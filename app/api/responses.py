"""JSON answers by orjson: numpy arrays are lists, and NaN and infinity are ``null``."""

from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Send

Header = tuple[bytes, bytes]

_JSON: Header = (b"content-type", b"application/json")


class JsonResponse(Response):
    """The answer of a route of FastAPI."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _rendered(content)


async def send_json(send: Send, content: Any, *headers: Header) -> None:
    """The answer of a short route, with the status 200."""
    body = _rendered(content)
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


def _rendered(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
