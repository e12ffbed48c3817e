"""``/v2/models/{model}/infer``."""

from collections.abc import Mapping

from starlette.types import Send

from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.oip.calls import ModelCalls
from app.api.oip.errors import error_response
from app.api.oip.infer_answer import send_answer
from app.api.oip.reading import read_asked
from app.api.short_path import ShortRoute
from app.domain.errors import UnknownModel

MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version:int}"
_MAX_DIGITS = 18
"""Limit for a version, which Triton stores in 64 bits."""


class InferRoutes:
    def __init__(self, calls: ModelCalls, limits: Limits) -> None:
        self._calls = calls
        self._limits = limits

    def short_routes(self) -> list[ShortRoute]:
        return [ShortRoute(f"{path}/infer", self.infer, error_response) for path in (MODEL, VERSION)]

    async def infer(self, exchange: Exchange, found: Mapping[str, str], _send: Send) -> None:
        calls = self._calls
        signature, version = calls.admit(exchange, found["model"], "unary"), version_of(found)
        deadline = deadline_of(exchange, calls.timeout_s)
        calls.check_load(exchange, signature, deadline)
        asked = await read_asked(exchange, signature, version, self._limits)
        with CancelledOnDisconnect(exchange):
            response = await calls.answer(exchange, signature, asked.inference, deadline)
        await send_answer(exchange, asked, response)


def version_of(found: Mapping[str, object]) -> str:
    """The version in the path, or an empty string. Raises UnknownModel."""
    text = str(found.get("version", ""))
    if len(text) > _MAX_DIGITS:
        raise UnknownModel.named(str(found["model"]), text)
    return str(int(text)) if text else ""
