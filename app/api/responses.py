"""JSON answers."""

from collections.abc import Iterable, Mapping, MutableSequence
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from app.api.exchange import Exchange, Header
from app.core.json import is_large, json_in_turns, json_of

JSON: Header = (b"content-type", b"application/json")


class JsonResponse(Response):
    """The answer of a route of FastAPI: JSON values and Structs."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, default=msgspec.to_builtins, option=orjson.OPT_SERIALIZE_NUMPY)


async def send_json(exchange: Exchange, values: Mapping[str, Any], *headers: Header) -> None:
    """The answer of a short route, with the status 200."""
    if is_large(values):
        await send_parts(exchange, await json_in_turns(values), (JSON, *headers))
        return
    body = json_of(values)
    await exchange.answer((JSON, (b"content-length", b"%d" % len(body)), *headers), body)


async def send_parts(exchange: Exchange, parts: MutableSequence[Any], headers: Iterable[Header]) -> None:
    """Sends a large answer with the status 200. ``parts``: bytes, or buffers of bytes; empty afterwards."""
    length = (b"content-length", b"%d" % sum(map(len, parts)))
    await exchange.send({"type": "http.response.start", "status": 200, "headers": [length, *headers]})
    parts.reverse()
    while parts:  # each part is freed when it is sent
        part = parts.pop()
        await exchange.send({"type": "http.response.body", "body": part, "more_body": bool(parts)})
