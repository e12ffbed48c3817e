"""Opens the Tritons that the gateway calls, each with everything that belongs to its address."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from app.domain.calls import CallObserver, CallObservers
from app.domain.engine import Engine
from app.observability.metrics import CallMetrics, LaneMetrics, Metrics
from app.observability.tensors import TensorLog
from app.observability.tracing import CallTracing, Tracer
from app.process.canaries import SampleCanaries
from app.process.credentials import credentials_of
from app.process.supervision import Supervisor
from app.process.triton import Triton
from app.settings import Settings
from app.triton.balancer import Balancer, BalancerObserver
from app.triton.cancels import PacedCancels
from app.triton.direct import DirectEngine
from app.triton.engine import TritonEngine
from app.triton.health import HealthByAddress, TritonHealth
from app.triton.hung import HungModels
from app.triton.lost_streams import LostStreams
from app.triton.pool import Pool
from app.triton.probes import BreakerProbes
from app.triton.repair import StubRepair
from app.triton.server import Server
from app.triton.shared_memory.lane import Lane
from app.triton.stubs import Stubs
from app.triton.stuck import StuckWatch
from app.triton.transport import Transport
from app.triton.transports import open_transport
from app.triton.watch import Watch

UP = {"up", "slow"}
"""States of a Triton that answers."""


@dataclass(frozen=True, slots=True)
class Calls:
    """How the gateway calls Triton: at one address or at several."""

    engine: Engine
    lane: Lane | None = None


@dataclass(slots=True)
class Servers:
    settings: Settings
    triton: Triton
    metrics: Metrics
    tracer: Tracer
    supervisor: Supervisor
    canaries: SampleCanaries = field(default_factory=SampleCanaries)
    health: HealthByAddress = field(default_factory=HealthByAddress)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Calls]:
        """For the duration of the block the gateway calls its Tritons, and cares for them."""
        names = self.triton.addresses
        if self.triton.is_single:
            async with self._direct(names[0]) as calls:
                yield calls
            return
        balancer = Balancer(CountedBalancing(self.metrics, self.triton.grpc_url))
        pool = Pool(names, balancer, self._balanced)
        watch = Watch(balancer, self.canaries)
        try:
            await pool.open()
            async with (
                self.supervisor.running("addresses of Triton", pool.run()),
                self.supervisor.running("watch of the Tritons", watch.run()),
            ):
                yield Calls(balancer)
        finally:
            await pool.close()

    @asynccontextmanager
    async def _direct(self, address: str) -> AsyncIterator[Calls]:
        """The only Triton: without a balancer, and with shared memory where that is on."""
        health = self._new_health()
        async with self._transport(address) as transport, self._lane(transport) as lane:
            engine = DirectEngine(transport, self._observer(CallMetrics(self.metrics)), health, self._cancels(), lane)
            engine.on_repeat = self.metrics.triton_repeats.inc
            async with self._care(address, engine, health):
                yield Calls(engine, lane)

    @asynccontextmanager
    async def _balanced(self, address: str) -> AsyncIterator[Server]:
        """One Triton of several. Without shared memory: Tritons elsewhere cannot map it."""
        health = self._new_health()
        async with self._transport(address) as transport:
            observer = self._observer(CallMetrics(self.metrics, address))
            engine = TritonEngine(transport, observer, health, self._cancels())
            async with self._care(address, engine, health):
                yield Server(address, engine, health)

    def _transport(self, address: str) -> AbstractAsyncContextManager[Transport]:
        name = self.triton.addresses[0] if address not in self.triton.addresses else address
        return open_transport(
            address,
            fast_pings=self.triton.allows_fast_pings,
            kind=self.settings.grpc,
            authority=name,
            credentials=credentials_of(self.settings),
        )

    def _new_health(self) -> TritonHealth:
        stubs = Stubs(self.metrics.count_stub_death, are_repaired=self.settings.repairs_triton)
        return TritonHealth(stubs, self.metrics.count_open_breakers)

    def _cancels(self) -> PacedCancels:
        """The part of this process in the rate of cancellations that each Triton can handle."""
        return PacedCancels.shared_by(self.triton.part.workers if self.triton.part else 1)

    @asynccontextmanager
    async def _lane(self, transport: Transport) -> AsyncIterator[Lane | None]:
        """None without shared memory. A supervisor of workers has none: its workers call the models."""
        limit = self.settings.shared_memory_limit if self.triton.part or self.settings.workers == 1 else 0
        if not limit:
            yield None
            return
        lane = Lane(transport, limit, LaneMetrics(self.metrics))
        async with self.supervisor.running("shared memory", lane.run()):
            yield lane
        await lane.close()

    @asynccontextmanager
    async def _care(self, address: str, engine: TritonEngine, health: TritonHealth) -> AsyncIterator[None]:
        """Closes breakers again. Outside of workers, also repairs models and notices that Triton is stuck."""
        self.health[address] = health
        async with AsyncExitStack() as stack:
            stack.callback(self.health.pop, address)
            stack.push_async_callback(engine.close)
            probes = BreakerProbes(engine, health.breakers, self.canaries)
            await stack.enter_async_context(self.supervisor.running("probes of models", probes.run()))
            lost = LostStreams(engine, health, self.canaries)
            await stack.enter_async_context(self.supervisor.running("watch of streams", lost.run()))
            if self.triton.part is None:
                await stack.enter_async_context(self._repairs(engine, health))
            yield

    @asynccontextmanager
    async def _repairs(self, engine: TritonEngine, health: TritonHealth) -> AsyncIterator[None]:
        may_reload, restart = self.settings.repairs_triton, self.triton.restart
        repair = StubRepair(engine, health.stubs, self.canaries, may_reload=may_reload)
        hung = HungModels(engine, health, self.canaries, may_reload=may_reload, restart=restart)
        watch = StuckWatch(engine, health.progress, self.canaries, restart=restart)
        async with (
            self.supervisor.running("repair of models", repair.run()),
            self.supervisor.running("watch of hung models", hung.run()),
            self.supervisor.running("watch of inference calls", watch.run()),
        ):
            yield

    def _observer(self, counted: CallMetrics) -> CallObserver:
        observers: list[CallObserver] = [counted]
        if self.settings.traces_url is not None:
            observers.append(CallTracing(self.tracer))
        if self.settings.log_tensors == "shapes":
            observers.append(TensorLog())
        return CallObservers(*observers)


class CountedBalancing(BalancerObserver):
    """``name``: the label of ``triton_up`` while no address is known."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics = metrics
        self._name = name
        self.changed({})

    def changed(self, states: Mapping[str, str]) -> None:
        gauge = self._metrics.triton_up
        gauge.clear()
        for address, state in (states or {self._name: "down"}).items():
            gauge.labels(address).set(state in UP)

    def ejected(self, address: str, reason: str) -> None:
        self._metrics.triton_ejections.labels(address, reason).inc()

    def repeated(self) -> None:
        self._metrics.triton_repeats.inc()
