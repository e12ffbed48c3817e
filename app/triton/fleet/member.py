"""One of several Tritons, as the balancer sees it."""

import asyncio
import time
from collections import defaultdict, deque
from dataclasses import dataclass

from app.core.aio import Backoff
from app.core.engine import InferenceServer
from app.core.inference import InferenceRequest
from app.core.model import ModelConfig, ModelKey
from app.triton.health.health import TritonHealth

SLOW_START_S = 5.0
"""Duration of the slow start: a Triton that joins or returns gets its full share of requests after this time."""
LEAST_SHARE = 0.1
SAMPLES = 32
"""The number of latencies to remember for each model."""

NOT_READY = "not_ready"


@dataclass(slots=True)
class Slow:
    """A longer latency of the model than ``limit_s`` is too slow. ``probes``: when to probe the server."""

    model: str
    limit_s: float
    probes: Backoff


class TritonServer:
    """``engine`` calls the Triton at ``address``, and reports its calls to ``health``."""

    def __init__(self, address: str, engine: InferenceServer, health: TritonHealth | None = None) -> None:
        self.address = address
        self.engine = engine
        self.health = health or TritonHealth()
        self.in_flight = 0
        self.is_up = True
        self.is_leaving = False
        """Whether the address was removed from the configuration. Running requests may finish."""
        self.slow: Slow | None = None
        """Set while the server is ejected because it answers much slower than the others."""
        self.joined_at = 0.0
        """When its slow start began, in monotonic seconds; 0 without a slow start."""
        self.absences: dict[ModelKey, str] = {}
        """Models that must not be called on this server -> the reason."""
        self.configs: dict[ModelKey, ModelConfig] = {}
        """The latest configuration of each model on this server."""
        self.latencies: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        """The latest latencies of each model, in seconds."""
        self.movable: set[asyncio.Timeout] = set()
        """Ends the wait for requests that may be repeated on another server."""

    @property
    def state(self) -> str:
        if self.is_leaving:
            return "leaving"
        if not self.is_up:
            return "stuck" if self.health.is_stuck else "down"
        return "slow" if self.slow else "up"

    @property
    def is_usable(self) -> bool:
        return self.is_up and self.slow is None and not self.is_leaving

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
