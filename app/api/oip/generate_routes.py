"""``/v2/models/{model}/generate`` and ``/generate_stream``: Triton's generate extension."""

from collections.abc import Mapping

from starlette.types import Send

from app.api.bodies import off_loop
from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.inference import Writing
from app.api.limits import Limits
from app.api.oip.calls import ModelCalls
from app.api.oip.generate_answer import (
    Generated,
    Values,
    error_object,
    error_response,
    stream_error_response,
    values_of,
)
from app.api.oip.generate_request import generation_of
from app.api.oip.infer_request import Asked
from app.api.oip.reading import read_content
from app.api.oip.routes import MODEL, VERSION, version_of
from app.api.oip.signature import Signature
from app.api.responses import send_json
from app.api.short_path import ShortRoute
from app.api.streaming import Start, StreamResponse
from app.domain.errors import GatewayError
from app.pipelines.spec import StreamSpec
from app.streams.event import Event


class GenerateRoutes:
    def __init__(self, calls: ModelCalls, limits: Limits) -> None:
        self._calls = calls
        self._limits = limits

    def short_routes(self) -> list[ShortRoute]:
        unary = [ShortRoute(f"{path}/generate", self.generate, error_response) for path in (MODEL, VERSION)]
        streams = (f"{path}/generate_stream" for path in (MODEL, VERSION))
        return [*unary, *(ShortRoute(path, self.stream, stream_error_response, transport="stream") for path in streams)]

    async def generate(self, exchange: Exchange, found: Mapping[str, str], _send: Send) -> None:
        calls = self._calls
        signature = calls.admit(exchange, found["model"], "unary")
        deadline = deadline_of(exchange, calls.timeout_s)
        calls.check_load(exchange, signature, deadline)
        asked = await self._read(exchange, found, signature)
        with CancelledOnDisconnect(exchange):
            response = await calls.answer(exchange, signature, asked.inference, deadline)
        await send_json(exchange, values_of(asked, response))

    async def stream(self, exchange: Exchange, found: Mapping[str, str], send: Send) -> None:
        calls = self._calls
        signature = calls.admit(exchange, found["model"], "stream")
        deadline = deadline_of(exchange, StreamSpec().timeout_s)
        calls.check_load(exchange, signature, deadline)
        asked = await self._read(exchange, found, signature)
        with CancelledOnDisconnect(exchange):

            def problem_of(error: GatewayError, _request_id: str) -> Values:
                calls.complete(error, signature.config.name)
                return error_object(error)

            writing = Writing(Generated(asked), problem_of)
            stream, opening = await calls.open_stream(exchange, asked, deadline, writing)
        response = _Generation(
            stream.log, self._limits, start=Start(events=opening), on_left=stream.end, closing=stream.ended
        )
        await response(exchange.scope, exchange.receive, send)

    async def _read(self, exchange: Exchange, found: Mapping[str, str], signature: Signature) -> Asked:
        version = version_of(found)
        body = await read_content(exchange, self._limits)
        asked = await off_loop(lambda body: generation_of(body, signature, version), body)
        exchange.forget_body()
        return asked


class _Generation(StreamResponse):
    """Triton's framing: events with the data of a response or an error, without ids, names and a terminal event."""

    ping = b""

    @staticmethod
    def frame_of(event: Event) -> bytes:
        return b"" if event.name == "done" else b"data: %b\n\n" % event.data
