"""Opens a Triton that the gateway calls, with everything that belongs to its address."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from app.domain.calls import CallObserver, CallObservers
from app.observability.metrics import CallMetrics, LaneMetrics, Metrics
from app.observability.tensors import TensorLog
from app.observability.tracing import CallTracing, Tracer
from app.process.canaries import SampleCanaries
from app.process.supervision import Supervisor
from app.process.triton import Triton
from app.settings import Settings
from app.triton.cancels import PacedCancels
from app.triton.engine import TritonEngine
from app.triton.health import HealthByAddress, TritonHealth
from app.triton.repair import StubRepair
from app.triton.shared_memory.lane import Lane
from app.triton.stubs import Stubs
from app.triton.stuck import StuckWatch
from app.triton.transport import Transport
from app.triton.transports import open_transport


@dataclass(frozen=True, slots=True)
class Server:
    """One Triton at one address."""

    engine: TritonEngine
    lane: Lane | None


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
    async def opened(self, address: str) -> AsyncIterator[Server]:
        """For the duration of the block the gateway calls this Triton, and cares for it."""
        part = self.triton.part
        cancels = PacedCancels.shared_by(part.workers if part else 1)
        health = TritonHealth(Stubs(self.metrics.count_stub_death))
        pings = self.triton.allows_tight_pings
        async with AsyncExitStack() as stack:
            transport = await stack.enter_async_context(
                open_transport(address, tight_pings=pings, kind=self.settings.grpc)
            )
            lane = await stack.enter_async_context(self._lane(transport))
            engine = TritonEngine(transport, self._observer(), health, cancels, lane)
            stack.push_async_callback(engine.close)
            if part is None:
                await stack.enter_async_context(self._care(engine, health))
            self.health[address] = health
            stack.callback(self.health.pop, address)
            yield Server(engine, lane)

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
    async def _care(self, engine: TritonEngine, health: TritonHealth) -> AsyncIterator[None]:
        """Repairs models, and notices that Triton is stuck."""
        repair = StubRepair(engine, health.stubs, self.canaries, may_reload=self.settings.repairs_triton)
        watch = StuckWatch(engine, health.progress, self.canaries, restart=self.triton.restart)
        async with (
            self.supervisor.running("repair of models", repair.run()),
            self.supervisor.running("watch of inference calls", watch.run()),
        ):
            yield

    def _observer(self) -> CallObserver:
        observers: list[CallObserver] = [CallMetrics(self.metrics)]
        if self.settings.traces_url is not None:
            observers.append(CallTracing(self.tracer))
        if self.settings.log_tensors == "shapes":
            observers.append(TensorLog())
        return CallObservers(*observers)
