"""One request and its answer, with everything that a route needs besides the arguments of ASGI; and all that run.

The API key of a request is checked here, and what it allows (decision 21). The matched route decides whether a key is
needed, never the text of the path.

``ByteBudget`` limits the bytes of all request bodies in memory. New pages of memory cost as much as the copy into them:
16 MiB take 5.9 ms in new memory, and 1.6 ms in memory that was used before. So it keeps the mapping of the last body
for the next one, and ``FreedMemory`` decides when freed memory returns to the system.
"""

import asyncio
import ctypes
import math
import time
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from time import monotonic
from typing import Any, Protocol

import msgspec
import orjson
from starlette.responses import Response
from starlette.types import Message, Scope, Send
from websockets.server import ServerProtocol

from app.admission.keys import ANYONE, FollowedKeys, Key
from app.core import errors
from app.core.aio import DrainRate
from app.core.inference import Deadline, TensorMemory, TraceContext
from app.core.json import is_large, json_in_turns, json_of
from app.http1.protocol import HttpConnection
from app.http1.websocket import SocketTerms, WebSocket
from app.observability.record import RequestRecord, request_id_of
from app.pipelines.catalog import Catalog

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")


class JsonResponse(Response):
    """JSON values and Structs."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, default=msgspec.to_builtins, option=orjson.OPT_SERIALIZE_NUMPY)


class Exchange:
    """Created and closed by ``app.api.endpoint.Application`` for each request, which the current task handles."""

    def __init__(self, scope: Scope, send: Send, budget: "ByteBudget") -> None:
        self.scope = scope
        self.connection: HttpConnection = scope["state"]["connection"]
        self.key = ANYONE
        self.cors_headers: Sequence[Header] = ()
        self.send_body = send
        """Sends the messages after the start of an answer. :meth:`send` does so too."""
        self._budget = budget
        self._held_bytes = 0
        self.body_memory: mmap | None = None
        """The memory of a large body. Set to None, it is freed at once, or with the last tensor that refers to it."""
        self._tensor: memoryview | None = None
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        if b"upgrade" in self._headers and any("websocket" in each.lower() for each in self._all(b"upgrade")):
            self.connection.end_after_answer()  # a proxy may pass on the bytes after a refused handshake unread
        self.record = RequestRecord(request_id_of(self.header(b"x-request-id")), scope["method"], scope["path"])
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.is_answering = False
        """True after the status was sent: then the request is no longer interrupted."""
        self._cause: errors.GatewayError | None = None
        if b"traceparent" in self._headers and len(sent := self._all(b"traceparent")) == 1:
            self.record.trace = TraceContext.parse(sent[0], ",".join(self._all(b"tracestate")))

    def header(self, name: bytes) -> str | None:
        """Returns the first header with this name; ``name`` is in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def end(self, cause: errors.GatewayError) -> None:
        """Cancels the task, whose failure is then ``cause``. Implements :class:`Work`."""
        if self._cause is None and not self.is_answering:
            self._cause = cause
            self.task.cancel()

    def cause_of_cancellation(self) -> errors.GatewayError | None:
        """Returns why :meth:`end` cancelled the task; None if something else cancelled it.

        Clears the task's cancellation, so that it can answer.
        """
        if self._cause is not None:
            self.task.uncancel()
        return self._cause

    def deadline(self, timeout_s: float) -> Deadline:
        """The request's deadline: ``X-Request-Timeout``, at most ``timeout_s``, that of the pipeline.

        Raises InvalidRequest if the header is not a positive number.
        """
        text = self._headers.get(b"x-request-timeout")
        if text is None:
            return Deadline.after(timeout_s)
        try:
            seconds = float(text.decode("latin-1"))
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise errors.InvalidRequest("X-Request-Timeout is not a positive number of seconds.")
        return Deadline.after(min(seconds, timeout_s))

    def hold(self, size: int) -> None:
        """Counts bytes of the body until the exchange ends. Raises TooManyRequests."""
        self._budget.take(size)
        self._held_bytes += size

    def memory(self, size: int) -> mmap:
        """Returns memory of at least ``size`` bytes for a large body until the exchange ends. Call it once."""
        self.body_memory = memory = self._budget.mapping(size)
        return memory

    def tensor_memory(self, size: int, tensor_at: int) -> memoryview | None:
        """Returns memory for a body with tensors until the exchange ends; see TensorMemory. Call it once."""
        memory = self._budget.tensor_memory
        self._tensor = None if memory is None else memory.take(size, tensor_at)
        return self._tensor

    def release(self, size: int) -> None:
        """Gives back counted bytes before the exchange ends."""
        self._budget.give_back(size)
        self._held_bytes -= size

    def forget_request(self) -> None:
        """Frees the request's headers and the memory of its body, for an answer that takes a long time."""
        self._headers.clear()
        self.scope["headers"].clear()
        self.body_memory = None

    def cancelled_on_disconnect(self) -> AbstractContextManager[None]:
        """Cancels the block when the client disconnects, and raises ClientClosedRequest. Needs no further task.

        The block runs in the task of the request.
        """
        return _Watch(self.connection, self.task)

    async def send(self, message: Message) -> None:
        """Adds the headers of every answer to the start of the answer."""
        if message["type"] == "http.response.start":
            message["headers"] = self._headers_of(message["status"], message["headers"])
            self.is_answering = True
        await self.send_body(message)

    def upgrade(self, protocol: ServerProtocol, headers: Iterable[Header], terms: SocketTerms) -> WebSocket:
        """Makes the connection a WebSocket. Raises the errors of :meth:`HttpConnection.upgrade`."""
        websocket = self.connection.upgrade(protocol, self._headers_of(101, headers), terms)
        self.is_answering = True
        return websocket

    async def answer(self, body: bytes, *headers: Header) -> None:
        """Sends a whole answer with the status 200: directly to the connection if possible, otherwise by ASGI."""
        own = self._headers_of(200, (*headers, (b"content-length", b"%d" % len(body))))
        self.is_answering = True
        if not self.connection.answer(200, own, body):
            await self.send_body({"type": "http.response.start", "status": 200, "headers": own})
            await self.send_body({"type": "http.response.body", "body": body})

    async def send_json(self, values: Mapping[str, Any]) -> None:
        """Sends a whole answer with the status 200."""
        if is_large(values):
            await self.send_parts(await json_in_turns(values), [JSON])
        else:
            await self.answer(json_of(values), JSON)

    async def send_parts(self, parts: MutableSequence[Any], headers: Iterable[Header]) -> None:
        """Sends a large answer with the status 200. ``parts``: bytes, or buffers of bytes; empty afterwards."""
        length = (b"content-length", b"%d" % sum(map(len, parts)))
        await self.send({"type": "http.response.start", "status": 200, "headers": [length, *headers]})
        parts.reverse()
        while parts:  # each part is freed when it is sent
            part = parts.pop()
            await self.send({"type": "http.response.body", "body": part, "more_body": bool(parts)})

    def _headers_of(self, status: int, headers: Iterable[Header]) -> list[Header]:
        """Notes the status. Returns ``headers`` and the headers of every answer."""
        record, early_exit = self.record, self.record.early_exit
        record.status = status
        if early_exit is not None and record.transport == "unary":
            headers = (*headers, (b"x-early-exit", early_exit.encode("latin-1")))
        return [
            *headers,
            (b"x-request-id", record.request_id.encode()),
            (b"server-timing", record.server_timing().encode()),
            *self.cors_headers,
        ]

    def close(self) -> None:
        """Releases the counted bytes and the memory."""
        if self.record.error is not None:
            self.record.error.forget_frames()  # they refer to this exchange: only a garbage collection would free them
        self.scope["state"].clear()  # refers to this exchange, too
        self._budget.give_back(self._held_bytes, self.body_memory)
        self.body_memory = None
        if self._tensor is not None and self._budget.tensor_memory is not None:
            self._budget.tensor_memory.give_back(self._tensor)

    def _all(self, name: bytes) -> list[str]:
        return [value.decode("latin-1") for each, value in self.scope["headers"] if each == name]


class _Watch(msgspec.Struct):
    """A class, because a generator costs 1.5 us more: 4 % of a small POST."""

    connection: HttpConnection
    task: asyncio.Task[Any]
    is_lost: bool = False

    def __enter__(self) -> None:
        self.connection.on_lost = self._cancel
        if self.connection.is_lost:
            self._cancel()

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        self.connection.on_lost = None
        if self.is_lost and isinstance(exc, asyncio.CancelledError):
            self.task.uncancel()
            raise errors.ClientClosedRequest("The client disconnected before the answer was ready.") from None

    def _cancel(self) -> None:
        self.is_lost = True
        self.task.cancel()


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
        raise errors.Unauthenticated("The request has several API keys.", hint="Send one key, in one header.")
    if not found:
        return None
    key = keys.key_of(found.pop(), time.time())
    exchange.key, exchange.record.key = key, key.id
    return key


def check_pipeline(exchange: Exchange, catalog: Catalog, name: str) -> None:
    """Raises Forbidden, whether the pipeline exists or not, and UnknownPipeline without the names of others.

    Raises UpstreamUnavailable while the pipelines are not known.
    """
    if exchange.key.pipelines is None:
        return
    if not exchange.key.allows(name):
        raise errors.Forbidden("This API key does not allow this pipeline.", hint=hint_of("pipelines"))
    catalog.check_known()
    if name not in catalog.entries:
        raise errors.UnknownPipeline("There is no such pipeline.")


def check_model(exchange: Exchange, catalog: Catalog, model: str) -> None:
    """Raises Forbidden, whether the model exists or not."""
    if not allows_model(exchange.key, catalog, model):
        raise errors.Forbidden("This API key does not allow this model.", hint=hint_of("pipelines"))


def allows_model(key: Key, catalog: Catalog, model: str) -> bool:
    """Whether a pipeline that the key allows runs the model. A name that no pipeline has is that of a model."""
    if key.pipelines is None:
        return True
    entries = catalog.entries
    return any(model == (entries[name].spec.model if name in entries else name) for name in key.pipelines)


LARGE_BODY_BYTES = 1024 * 1024
IDLE_S = 1.0
KEPT_BYTES = 64 * 1024 * 1024
"""The most freed memory that is kept; glibc keeps as much after a block of 32 MiB, the largest that its heap takes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LIBC = ctypes.CDLL(None)


class FreedMemory:
    """Keeps freed memory while large requests follow each other, and returns it to the system afterwards.

    ``release`` is called in a thread, because it may take milliseconds.
    """

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, size: int) -> None:
        """Counts freed memory. LARGE_BODY_BYTES or more are released when no more than that is freed for IDLE_S."""
        self._size += size
        if self._size < LARGE_BODY_BYTES:
            return
        self._size = 0
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(IDLE_S, loop.run_in_executor, None, self._release)


def keep_freed_memory() -> None:
    """Keeps memory that is freed from now on.

    glibc keeps freed memory only up to twice the largest block so far, and the blocks of one request are together
    larger. Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    with suppress(AttributeError):  # another C library
        _LIBC.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def release_freed_memory() -> None:
    """Returns freed memory to the system."""
    with suppress(AttributeError):
        _LIBC.malloc_trim(0)


class ByteBudget:
    """Limits the bytes of all request bodies in memory, and keeps one unused mapping for the next large body.

    ``tensor_memory``: for large bodies that consist of one tensor; None: they use ordinary memory.
    """

    def __init__(self, limit: int, tensor_memory: TensorMemory | None = None) -> None:
        self._limit = limit
        self.tensor_memory = tensor_memory
        self.taken = 0
        self._spare: mmap | None = None
        self._freed = FreedMemory(self._release)
        self._outflow = DrainRate()

    def take(self, size: int) -> None:
        """Raises TooManyRequests."""
        if self.taken + size > self._limit:
            raise errors.TooManyRequests(
                "The gateway has reached its limit for bytes of request bodies in memory.",
                hint="Send fewer large bodies at once, or raise GATEWAY_MAX_BYTES_IN_FLIGHT.",
                retry_after_s=self._outflow.retry_after_s(self.taken + size - self._limit, monotonic()),
            )
        self.taken += size

    def mapping(self, size: int) -> mmap:
        """Returns at least ``size`` bytes with arbitrary content: read only bytes that were written before."""
        spare, self._spare = self._spare, None
        if spare is not None and len(spare) >= size:
            return spare
        return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)

    def give_back(self, size: int, mapping: mmap | None = None) -> None:
        """``mapping``: of the body. It is kept unless something still refers to its memory, as a thread may.

        That of a body below LARGE_BODY_BYTES is not kept: nothing would release it later.
        """
        if self.taken > self._limit // 2:  # below, only a body of more than half of the limit is refused
            self._outflow.left(size, monotonic())
        self.taken -= size
        if size >= LARGE_BODY_BYTES:
            if mapping is not None:
                with suppress(BufferError):
                    mapping.resize(len(mapping))  # changes nothing, and is refused while a buffer of it exists
                    self._spare = mapping
            self._freed.add(size)

    def _release(self) -> None:
        self._spare = None
        release_freed_memory()


class Work(Protocol):
    def end(self, cause: errors.GatewayError) -> None:
        """Ends the work as soon as possible and reports ``cause`` to the caller. No-op if the work has ended."""


class Workload:
    """The work in progress: requests from their admission to their last byte, running streams, and WebSockets.

    The drain waits for its end.
    """

    def __init__(self) -> None:
        self.is_shutting_down = False
        """True after the first signal: the gateway is no longer ready, but still admits work."""
        self.is_draining = False
        """True after the drain has started: new work is rejected."""
        self.running: dict[Work, Callable[[], None] | None] = {}
        """Each with the function that ends it in the drain; None if it ends by itself."""
        self._idle = asyncio.Event()

    def begin(self, work: Work) -> None:
        """Adds new work. Raises Draining."""
        if self.is_draining:
            raise errors.Draining("The gateway is shutting down; send the request again.")
        self.running[work] = None

    def add(self, work: Work, drain: Callable[[], None] | None = None) -> None:
        """Adds work that also runs during the drain.

        ``drain``: for work that would not end by itself, such as a WebSocket: takes nothing more, and ends when nothing
        is under way.
        """
        self.running[work] = drain
        if drain is not None and self.is_draining:
            drain()

    def remove(self, work: Work) -> None:
        """No-op if ``work`` was never added."""
        self.running.pop(work, None)
        if not self.running:
            self._idle.set()

    def start_draining(self) -> None:
        self.is_shutting_down = self.is_draining = True
        for drain in list(self.running.values()):
            if drain is not None:
                drain()

    async def idle(self) -> None:
        """Waits until no work is in progress."""
        while self.running:
            self._idle.clear()
            await self._idle.wait()
