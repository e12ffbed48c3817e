"""JSON answers."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from app.api.exchange import Exchange, Header
from app.domain.json_text import is_large, json_in_turns, json_of

_JSON: Header = (b"content-type", b"application/json")


class JsonResponse(Response):
    """The answer of a route of FastAPI."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_of(content)


async def send_json(exchange: Exchange, values: Mapping[str, Any], *headers: Header) -> None:
    """The answer of a short route, with the status 200."""
    body = await json_in_turns(values) if is_large(values) else json_of(values)
    await exchange.answer((_JSON, (b"content-length", b"%d" % len(body)), *headers), body)
