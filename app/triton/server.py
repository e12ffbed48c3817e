"""One Triton of several, as the balancer sees it."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from app.domain.engine import Engine
from app.domain.errors import UpstreamUnavailable
from app.domain.inference import InferenceRequest
from app.domain.model import ModelConfig
from app.triton.health import TritonHealth

SLOW_START_S = 5.0
"""A Triton that joins or returns gets its whole share of the requests after this time."""
LEAST_SHARE = 0.1
SAMPLES = 32
"""So many latencies of a model are remembered."""

NOT_READY = "not_ready"
ModelKey = tuple[str, str]
"""A model's name and version; an empty version is the newest."""


class Server:
    """``engine`` calls the Triton at ``address``, and reports its calls to ``health``."""

    def __init__(self, address: str, engine: Engine, health: TritonHealth | None = None) -> None:
        self.address = address
        self.engine = engine
        self.health = health or TritonHealth()
        self.in_flight = 0
        self.is_up = True
        self.is_leaving = False
        """Whether the address is not configured any more: what runs there may end."""
        self.is_slow = False
        """Whether it is ejected because it answers much slower than the others."""
        self.joined_at = 0.0
        """When its slow start began, in seconds on ``time.monotonic``; 0 without a slow start."""
        self.absences: dict[ModelKey, str] = {}
        """Models that are not to be called here, and why not."""
        self.configs: dict[ModelKey, ModelConfig] = {}
        """As the server last said."""
        self.latencies: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        """The latest of each model, in seconds."""
        self._movable: set[asyncio.Task[object]] = set()
        """Tasks whose request may be repeated elsewhere."""
        self._moved: set[asyncio.Task[object]] = set()

    @property
    def state(self) -> str:
        if self.is_leaving:
            return "leaving"
        if not self.is_up:
            return "stuck" if self.health.progress.is_stuck else "down"
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
        """Whether the model of the request may be called here, as far as it is known."""
        return not self.absences or (request.model, request.version) not in self.absences

    def load(self, now: float) -> float:
        """The requests that are under way, as if the server had its whole share."""
        if not self.joined_at:
            return self.in_flight
        share = (now - self.joined_at) / SLOW_START_S
        if share >= 1.0:
            self.joined_at = 0.0
        return (self.in_flight + 1) / min(max(share, LEAST_SHARE), 1.0) - 1

    def go_up(self, *, slowly: bool) -> None:
        self.is_up = True
        if slowly:
            self.start_slowly()

    def go_down(self) -> None:
        """Requests under way that may be repeated are taken back at once."""
        self.is_up = False
        for task in self._movable:
            self._moved.add(task)
            task.cancel()
        self._movable.clear()

    def start_slowly(self) -> None:
        self.joined_at = time.monotonic()
        self.latencies.clear()

    @contextmanager
    def movable(self) -> Iterator[None]:
        """While the block runs, :meth:`go_down` ends it with UpstreamUnavailable. See :class:`asyncio.Timeout`."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._movable.add(task)
        try:
            yield
        except asyncio.CancelledError as exc:
            if task in self._moved and task.uncancel() <= cancelling:
                raise UpstreamUnavailable("The Triton that had the request stopped answering.") from exc
            raise
        finally:
            self._movable.discard(task)
            self._moved.discard(task)
