"""Distributes requests over several Tritons. If a server did not receive its request, another server gets it.

``Balancer`` is an engine over several engines, which answers for their models as one.
docs/decisions/0014-health-of-triton.md has the reasons.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from app.core.engine import Document, InferenceServer, discard_stream
from app.core.errors import GatewayError, ModelNotReady, Unavailable, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.model import ModelConfig, ModelKey, ModelState
from app.triton.health.health import TritonHealth
from app.triton.triton_engine import may_repeat

T = TypeVar("T")
Signature = tuple[object, ...]
NOT_READY, OTHER_SIGNATURE = "not_ready", "other_signature"
"""Why a model is not called on a server."""
ANSWER_S = 3.0
"""Timeout of a query about a model."""
LIVE_S = 1.0
"""Timeout of the liveness check. A server that answers other calls during this time counts as live too."""
MOST = 10_000
"""The number of requests to remember, including ended requests, whose cancellation may arrive later."""
SLOW_START_S = 5.0
"""Duration of the slow start: a Triton that joins or returns gets its full share of requests after this time."""
LEAST_SHARE = 0.1
SAMPLES = 32
"""The number of latencies to remember for each model."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TritonServer:
    """``engine`` calls the Triton at ``address``, and reports its calls to ``health``."""

    address: str
    engine: InferenceServer
    health: TritonHealth = field(default_factory=TritonHealth)
    in_flight: int = 0
    is_up: bool = True
    is_leaving: bool = False
    """Whether the address was removed from the configuration. Running requests may finish."""
    is_slow: bool = False
    """Whether the server is ejected because it answers much slower than the others."""
    joined_at: float = 0.0
    """When its slow start began, in monotonic seconds; 0 without a slow start."""
    absences: dict[ModelKey, str] = field(default_factory=dict)
    """Models that must not be called on this server -> the reason."""
    configs: dict[ModelKey, ModelConfig] = field(default_factory=dict)
    """The latest configuration of each model on this server."""
    latencies: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=SAMPLES)))
    """The latest latencies of each model, in seconds."""
    movable: set[asyncio.Timeout] = field(default_factory=set)
    """Ends the wait for requests that may be repeated on another server."""

    @property
    def state(self) -> str:
        if self.is_leaving:
            return "leaving"
        if not self.is_up:
            return "stuck" if self.health.is_stuck else "down"
        return "slow" if self.is_slow else "up"

    @property
    def is_usable(self) -> bool:
        return self.is_up and not self.is_slow and not self.is_leaving

    def note_readiness(self, key: ModelKey, *, is_ready: bool) -> None:
        if not is_ready:
            self.absences[key] = NOT_READY
            self.configs.pop(key, None)
        elif self.absences.get(key) == NOT_READY:
            del self.absences[key]

    def has(self, request: InferenceRequest) -> bool:
        """Whether the model of the request may be called on this server; True if unknown."""
        return not self.absences or (request.model, request.version) not in self.absences

    def load(self, now: float) -> float:
        """The number of running requests, scaled up during a slow start."""
        if not self.joined_at:
            return self.in_flight
        share = (now - self.joined_at) / SLOW_START_S
        if share >= 1.0:
            self.joined_at = 0.0
        return (self.in_flight + 1) / min(max(share, LEAST_SHARE), 1.0) - 1

    def start_slowly(self) -> None:
        self.joined_at = time.monotonic()
        self.latencies.clear()


def signature_of(config: ModelConfig) -> Signature:
    """Returns the parts of a configuration that determine how requests are sent and responses are read."""
    return config.inputs, config.outputs, config.max_batch_size, config.decoupled


class Balancer(InferenceServer):
    """Distributes requests over servers. :class:`app.triton.fleet.pool.ServerPool` updates their states."""

    def __init__(
        self,
        changed: Callable[[Mapping[str, str], str], None] = lambda states, ejected: None,
        repeated: Callable[[], None] = lambda: None,
    ) -> None:
        """``changed``: called with the states of the servers, and the address of a server that was ejected, or none.

        ``repeated``: called before a request is sent again.
        """
        self.servers: list[TritonServer] = []
        self._chosen: dict[ModelKey, Signature] = {}
        """For each model whose configuration was requested."""
        self._places: OrderedDict[str, TritonServer] = OrderedDict()
        """Request id -> the Triton that received the request, so that a ``cancel`` model is called there."""
        self._changed = changed
        self._repeated = repeated
        self.suspected = asyncio.Event()
        """Set when a call failed in a way that indicates a fault of its server."""

    # The servers

    @property
    def _staying(self) -> list[TritonServer]:
        return [server for server in self.servers if not server.is_leaving]

    def states(self) -> Mapping[str, str]:
        return {server.address: server.state for server in self.servers}

    def tell(self, ejected: TritonServer | None = None) -> None:
        """Call this after each change of a state. ``ejected``: a server that is not used from now on."""
        if ejected is not None:
            _log.error("Triton at %s is not used: it is %s", ejected.address, ejected.state)
        self._changed(self.states(), "" if ejected is None else ejected.address)

    def put_down(self, server: TritonServer) -> None:
        """Uses a server no more that does not answer. Its requests that may be repeated go to another server."""
        server.is_up = False
        for each in server.movable:
            each.reschedule(asyncio.get_running_loop().time())
        server.movable.clear()
        self.tell(server)

    async def is_live(self) -> bool:
        """Whether any Triton answers."""
        await asyncio.gather(*(self.look_at(server) for server in self.servers))
        return any(server.is_up for server in self.servers)

    async def look_at(self, server: TritonServer) -> None:
        """Checks whether the server is live. If it has returned, queries its models in use before using it."""
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(LIVE_S):
                is_live = await server.engine.is_live()
        except TimeoutError:
            is_live = server.health.is_heard_since(asked_at)
        if is_live and not server.is_up:
            with suppress(GatewayError):
                await asyncio.gather(*(_in_time(self._read_config(server, key)) for key in self._chosen))
                if any(each.is_up for each in self.servers):
                    server.start_slowly()
                server.is_up = True
                _log.info("Triton at %s answers", server.address)
                self.tell()
        elif server.is_up and not is_live:
            self.put_down(server)

    # Their models, as those of one server

    async def models(self) -> Sequence[ModelState]:
        """Returns the models of all servers. A model is ready if it is ready on at least one server."""
        rows: dict[tuple[str, str], ModelState] = {}
        for _, states in await self._ask(lambda server: server.engine.models()):
            for state in states:
                key = state.name, state.version
                if key not in rows or (state.ready and not rows[key].ready):
                    rows[key] = state
        return list(rows.values())

    async def model_ready(self, model: str, version: str = "") -> bool:
        """Whether the model is ready on any server."""
        answers = await self._ask(lambda server: self._note_readiness(server, (model, version)))
        return any(is_ready for _, is_ready in answers)

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        """Returns the configuration that most servers have; in a tie, the signature that was chosen before.

        A server with another signature is not used for the model. The instance count is the sum over all servers with
        the signature, including servers that are down.
        """
        key, by_signature = (model, version), defaultdict[Signature, list[ModelConfig]](list)
        for server, config in await self._ask(lambda server: server.engine.model_config(*key)):
            server.configs[key] = config
            by_signature[signature_of(config)].append(config)
        known = self._chosen.get(key)
        chosen = max(by_signature, key=lambda signature: (len(by_signature[signature]), signature == known))
        self._chosen[key] = chosen
        staying = [server for server in self._staying if key in server.configs]
        equal = [server.configs[key] for server in staying if self._has_chosen(server, key)] or by_signature[chosen]
        return replace(equal[0], instance_count=sum(config.instance_count for config in equal))

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        """Returns the document of one server. Statistics are those of one server too."""
        request = InferenceRequest(model, (), version)
        return await self._picked(request).engine.document(document, model, version)

    def homes(self, model: str, version: str = "") -> Sequence[str]:
        request = InferenceRequest(model, (), version)
        return [each.address for each in self._able(request, ()) if each.is_usable]

    def absences(self, model: str, version: str = "") -> Mapping[str, str]:
        key = (model, version)
        return {server.address: server.absences[key] for server in self._staying if key in server.absences}

    def fault(self, model: str) -> str:
        """The fault at the first Triton that has one."""
        return next(filter(None, (server.engine.fault(model) for server in self._staying)), "")

    async def _read_config(self, server: TritonServer, key: ModelKey) -> None:
        if await self._note_readiness(server, key):
            server.configs[key] = await server.engine.model_config(*key)
            self._has_chosen(server, key)

    def _has_chosen(self, server: TritonServer, key: ModelKey) -> bool:
        """Whether a server has the chosen signature. Otherwise marks it, and logs this once."""
        has_chosen = signature_of(server.configs[key]) == self._chosen[key]
        is_marked = server.absences.get(key) == OTHER_SIGNATURE
        if has_chosen and is_marked:
            del server.absences[key]
        elif not has_chosen and not is_marked:
            server.absences[key] = OTHER_SIGNATURE
            text = "model '%s' at %s has other inputs or outputs than on most Tritons: it is not used there"
            _log.error(text, key[0], server.address)
        return has_chosen

    async def _note_readiness(self, server: TritonServer, key: ModelKey) -> bool:
        try:
            is_ready = await server.engine.model_ready(*key)
        except ModelNotReady:
            is_ready = False
        server.note_readiness(key, is_ready=is_ready)
        return is_ready

    async def _ask(self, question: Callable[[TritonServer], Awaitable[T]]) -> list[tuple[TritonServer, T]]:
        """Returns the answers of the servers that answer. If no server answers, raises the error of one of them."""
        servers = [server for server in self._staying if server.is_up] or self._staying
        results = await asyncio.gather(*(_in_time(question(server)) for server in servers), return_exceptions=True)
        answers = [(servers[i], result) for i, result in enumerate(results) if not isinstance(result, BaseException)]
        for result in results:
            if isinstance(result, BaseException) and (not answers or not isinstance(result, GatewayError)):
                raise result
        if not answers:
            raise _no_address()
        return answers

    # Requests

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """While no server has received the request, every server may be tried. Otherwise it is repeated only once."""
        server, may_have_run = self._picked(request), False
        tried = {server}
        while True:
            try:
                return await self._at(server, request, deadline)
            except Unavailable as exc:
                if not may_repeat(exc, request) or (exc.was_sent and may_have_run) or deadline.has_passed:
                    raise
                may_have_run |= exc.was_sent
                other = self._pick(request, tried)
                if other is None and not exc.was_sent:
                    raise
            server = other or server
            tried.add(server)
            self._repeated()

    async def _at(self, server: TritonServer, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        began = time.monotonic()
        with self._under_way(server, request):
            try:
                async with asyncio.timeout(None) as movable:
                    if request.idempotent:
                        server.movable.add(movable)
                    response = await server.engine.infer(request, deadline)
            except TimeoutError as exc:
                raise UpstreamUnavailable("The Triton that had the request stopped answering.") from exc
            finally:
                server.movable.discard(movable)
        server.latencies[request.model].append(time.monotonic() - began)
        return response

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        """Streams from one server. A stream that has begun is never moved to another server."""
        if request.about:
            await self._cancel(request, deadline)
            return
        tried = set[TritonServer]()
        server, has_begun = self._picked(request), False
        while True:
            tried.add(server)
            try:
                with self._under_way(server, request):
                    async with aclosing(server.engine.infer_stream(request, deadline)) as responses:
                        async for response in responses:
                            if not has_begun:
                                has_begun, request = True, request.without_inputs()
                            yield response
                return
            except Unavailable as exc:
                may_move = not has_begun and not exc.was_sent and request.sequence is None
                other = self._pick(request, tried) if may_move else None
                if other is None:
                    raise
                self._repeated()
                server = other

    async def _cancel(self, request: InferenceRequest, deadline: Deadline) -> None:
        """Calls a ``cancel`` model on the server that has the request, or on every server if that is unknown."""
        place = self._places.get(request.about)
        servers = [place] if place is not None else [each for each in self.servers if each.has(request)]
        streams = (discard_stream(each.engine, request, deadline) for each in servers)
        results = await asyncio.gather(*streams, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @contextmanager
    def _under_way(self, server: TritonServer, request: InferenceRequest) -> Iterator[None]:
        server.in_flight += 1
        if request.ends_by_hook:
            self._places[request.request_id] = server
            if len(self._places) > MOST:
                self._places.popitem(last=False)
        try:
            yield
        except Unavailable as exc:
            if exc.upstream is not None and not exc.was_answered:
                if isinstance(exc, ModelNotReady):
                    server.note_readiness((request.model, request.version), is_ready=False)
                elif not exc.was_sent and server.is_up:
                    self.put_down(server)
                self.suspected.set()
            raise
        finally:
            server.in_flight -= 1

    def _picked(self, request: InferenceRequest) -> TritonServer:
        """Picks a server. Raises UpstreamUnavailable or ModelNotReady.

        The server that has a sequence is picked in any state: it may know the sequence, and no other does.
        """
        if (sequence := request.sequence) is not None:
            server = next((each for each in self.servers if each.address == sequence.address), None)
            if server is None:
                sequence.is_lost = sequence.is_forgotten = True
                raise UpstreamUnavailable("The Triton that had the sequence is gone.", was_sent=False)
            return server
        if (server := self._pick(request, ())) is not None:
            return server
        able = [each for each in self._staying if each.has(request)]
        refusals = [refusal for each in able if (refusal := each.health.refusal(request.model)) is not None]
        if refusals:  # the one that will end first
            raise min(refusals, key=lambda refusal: refusal.retry_after_s or 0)
        if not self._staying:
            raise _no_address()
        raise ModelNotReady(f"No Triton has a ready model '{request.model}'.", was_sent=False)

    def _pick(self, request: InferenceRequest, tried: Collection[TritonServer]) -> TritonServer | None:
        """Picks the less loaded of two random servers, which is nearly as good as a comparison of all servers.

        If every server with the model is ejected, all of these are used.
        """
        able = self._able(request, tried)
        servers = [each for each in able if each.is_usable] or able
        if len(servers) < 2:
            return servers[0] if servers else None
        now = time.monotonic()
        return min(random.sample(servers, 2), key=lambda server: server.load(now))

    def _able(self, request: InferenceRequest, tried: Collection[TritonServer]) -> list[TritonServer]:
        able = [each for each in self.servers if each not in tried and not each.is_leaving and each.has(request)]
        if not request.is_probe:
            able = [each for each in able if each.health.refusal(request.model) is None]
        return able


def _no_address() -> UpstreamUnavailable:
    return UpstreamUnavailable("No address of Triton is known.", was_sent=False)


async def _in_time(answer: Awaitable[T]) -> T:
    """Raises UpstreamUnavailable if a server does not answer a query in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError as exc:
        raise UpstreamUnavailable("A Triton does not answer.") from exc
