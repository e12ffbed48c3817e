"""Describes one inference: the request to a model, its responses, and the limits of their time.

Requests and responses consist of tensors in the words of the Open Inference Protocol. A request travels with an id and
a deadline. Its raw tensors may be in memory of the engine (``TensorMemory``).
"""

import asyncio
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import ml_dtypes
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

_DIGITS = 32
_IDS_AT_ONCE = 256
_unused: list[str] = []


def new_request_id() -> str:
    """Returns a new id, 128 random bits as 32 hexadecimal digits; thread-safe.

    Requests randomness from the operating system once for many ids.
    """
    try:
        return _unused.pop()
    except IndexError:
        digits = os.urandom(_IDS_AT_ONCE * _DIGITS // 2).hex()
        _unused.extend(digits[start : start + _DIGITS] for start in range(_DIGITS, len(digits), _DIGITS))
        return digits[:_DIGITS]


os.register_at_fork(after_in_child=_unused.clear)


BYTES = "BYTES"

Array = NDArray[Any]

DTYPE_BY_DATATYPE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    BYTES: np.dtype(np.object_),
}
"""Open Inference Protocol datatype -> numpy dtype. The elements of a BYTES array are ``bytes``."""

INTEGER_DATATYPES = frozenset(name for name, dtype in DTYPE_BY_DATATYPE.items() if dtype.kind in "iu")
FLOAT_DATATYPES = frozenset({"FP16", "BF16", "FP32", "FP64"})


class Tensor(Struct, frozen=True, eq=False):
    """A named, typed array of a request or a response; ``array.dtype`` is the dtype of ``datatype``."""

    name: str
    datatype: str
    array: Array

    @classmethod
    def empty(cls, name: str, datatype: str, dims: Iterable[int]) -> Self:
        """No rows of these dimensions."""
        return cls(name, datatype, np.empty((0, *(max(dim, 0) for dim in dims)), DTYPE_BY_DATATYPE[datatype]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


def bytes_array(values: list[bytes], shape: tuple[int, ...]) -> Array:
    """Returns a BYTES array; numpy's constructor would cut trailing NULs and lose the rank of an empty array."""
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array if array.shape == shape else array.reshape(shape)


Buffer = bytes | memoryview
"""A memoryview has the format ``B``, so that ``len`` is its size in bytes."""
AnyBytes = TypeVar("AnyBytes", bytes, memoryview)
_QUICKLY_COPIED_BYTES = 16 * 1024


def raw_parts(tensor: Tensor) -> list[Buffer]:
    """Returns the raw bytes of a tensor in parts. Source: Open Inference Protocol, "Tensor Data"."""
    array = tensor.array
    if tensor.datatype == BYTES:
        return [part for element in array.flat for part in (len(element).to_bytes(4, "little"), element)]
    if array.nbytes <= _QUICKLY_COPIED_BYTES:
        return [array.tobytes()]
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]


def elements_in(raw: AnyBytes, most: int = sys.maxsize) -> tuple[list[AnyBytes], bool]:
    """The elements of a raw BYTES tensor, up to one more than ``most``; and whether the lengths fit."""
    size, elements, offset = len(raw), list[AnyBytes](), 0
    if size > 4 and int.from_bytes(raw[:4], "little") == size - 4:
        return [raw[4:]], True  # the usual text: one element
    while offset + 4 <= size and len(elements) <= most:
        end = offset + 4 + int.from_bytes(raw[offset : offset + 4], "little")
        elements.append(raw[offset + 4 : end])
        offset = end
    return elements, offset == size


SAMPLED = 0x01
_KNOWN_FLAGS = 0x03
"""The flags that the standard defines: sampled, and random trace id. A sender must not pass on other flags."""

_TRACEPARENT = re.compile(
    r"((?!ff)[0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?"
)
"""Version, trace id, span id, flags, and what later versions add."""
_KEY = r"(?:[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MAX_MEMBERS = 32
_MAX_STATE = 512


class TraceContext(Struct, frozen=True):
    """The position of a request in a distributed trace. Source: https://www.w3.org/TR/trace-context-2/.

    ``trace_id``: 32, ``span_id``: 16 lower-case hexadecimal digits; ``state``: a whole ``tracestate``, or empty.
    """

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> "TraceContext | None":
        """Returns None if ``traceparent`` is invalid. Ignores an invalid ``tracestate``."""
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        if version == "00" and rest is not None:
            return None
        members = [each for member in tracestate.split(",") if (each := member.strip(" \t"))]
        is_valid = len(tracestate) <= _MAX_STATE and len(members) <= _MAX_MEMBERS
        state = ",".join(members) if is_valid and all(map(_MEMBER.fullmatch, members)) else ""
        return cls(trace_id, span_id, int(flags, 16) & _KNOWN_FLAGS, state)

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def sampled(trace: TraceContext | None) -> TraceContext:
    """A sampled context: the given one if it is sampled, otherwise another span of the same trace."""
    if trace is None:
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8), SAMPLED)
    if trace.is_sampled:
        return trace
    return TraceContext(trace.trace_id, secrets.token_hex(8), trace.flags | SAMPLED, trace.state)


Parameter = bool | int | float | str


class RequestedOutput(Struct, frozen=True):
    """A requested output. ``classification``: the number of best classes to return instead of values, or 0."""

    name: str
    classification: int = 0


class SentAs(Struct, frozen=True):
    """The call in which a layer sent a request, if it is not a call of its own."""

    request_id: str
    """The id with which Triton knows the call."""
    trace: TraceContext | None
    notes: Mapping[str, int]
    """For the request's log line and span."""


class Extension(Struct, eq=False, kw_only=True):
    """What a request has for one layer around the engine. Only that layer reads the members of its own type."""

    sent_as: SentAs | None = None
    """Set by the layer."""
    is_for_streams: ClassVar[bool] = True


class OpenSequence(Extension, eq=False):
    """The sequence in Triton to which a request belongs. The engine notes how it ends unexpectedly."""

    address: str = ""
    """The Triton that has the sequence, one of :meth:`app.core.engine.InferenceServer.homes`."""
    is_lost: bool = False
    """Whether the state is lost or unknown."""
    is_forgotten: bool = False
    """Whether Triton no longer has the sequence."""


class KeptMemory(Extension, eq=False):
    """Lets large outputs of a call stay in the engine's memory, from which they reach further calls without a copy."""

    releases: list[Callable[[], None]] = field(default_factory=list)

    def release(self) -> None:
        """Gives the memory back. Call this after the last call that reads the outputs. Nothing may read them later."""
        while self.releases:
            self.releases.pop()()


StepOutcome = Literal["ok", "skipped", "failed", "cancelled", "exit"]


class StepTime(Struct):
    """``started``: of its first run; ``ended``: of its last one, on the clock of ``time.perf_counter``."""

    outcome: StepOutcome
    started: float
    ended: float
    seconds: float
    """Of all runs: a step behind a stream runs for each response."""


class StepTimes(Extension, eq=False):
    """The steps of a request that ran or were skipped. ``calls``: of models; their ids are ``<id>.<step>.<call>``."""

    plan: Any = None
    """What the layer that runs them knows of the steps."""
    steps: dict[str, StepTime] = field(default_factory=dict)
    calls: int = 0

    def add(self, step: str, outcome: StepOutcome, seconds: float = 0.0) -> None:
        now, known = time.perf_counter(), self.steps.get(step)
        if known is None:
            self.steps[step] = StepTime(outcome, now - seconds, now, seconds)
        elif outcome != "skipped":
            known.outcome, known.ended, known.seconds = outcome, now, known.seconds + seconds

    def __str__(self) -> str:
        """The slowest step, as a further part of Server-Timing."""
        name = max(self.steps, key=lambda each: self.steps[each].seconds, default="")
        return name and f", step;desc={name};dur={self.steps[name].seconds * 1e3:.2f}"


class InferenceRequest(Struct, frozen=True, eq=False):
    """A request to a model. A Struct, because creating and copying a frozen dataclass takes ten times as long."""

    model: str
    inputs: tuple[Tensor, ...]
    version: str = ""
    """Empty: Triton's version policy selects the version."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty: all outputs."""
    request_id: str = field(default_factory=new_request_id)
    """Always generated by the gateway, because Triton repeats the id in errors and cancellation uses it."""
    trace: TraceContext | None = None
    """The trace context of the span that calls the model."""
    takes_traceparent: bool = False
    """Whether the trace is also sent as the request parameter ``traceparent``."""
    idempotent: bool = False
    """Whether the model may run the request twice."""
    is_probe: bool = False
    """A request of the gateway itself, which finds out whether a model works. An open breaker lets it pass."""
    about: str = ""
    """For a ``cancel`` call: the id of the request to cancel. The call goes to the Triton that has that request."""
    ends_by_hook: bool = False
    """Whether a ``cancel`` model is called for an abandoned request; the stream then ends without cancellation."""
    extensions: tuple[Extension, ...] = ()
    """What layers around the engine need of the request."""

    @property
    def sequence(self) -> OpenSequence | None:
        """It goes to the Triton that has the sequence, and is never sent again."""
        for each in self.extensions:
            if isinstance(each, OpenSequence):
                return each
        return None

    @property
    def steps(self) -> StepTimes | None:
        return next((each for each in self.extensions if isinstance(each, StepTimes)), None)

    def without_inputs(self) -> Self:
        """Returns a copy for use during a stream, without the inputs, which may be large and are already sent."""
        return replace(self, inputs=())

    def extended(self, extension: Extension) -> Self:
        return replace(self, extensions=(*self.extensions, extension))

    def owned(self) -> Self:
        """Returns the request with copies of those tensors that may be in the memory of its body.

        That memory belongs to another caller's body when the caller leaves. A call for several callers goes on.
        """

        def copied(tensor: Tensor) -> Array:
            array = tensor.array
            if tensor.datatype == BYTES:
                return bytes_array([bytes(element) for element in array.flat], array.shape)
            owner = array if array.base is None else array.base
            return array if isinstance(owner, np.ndarray) and owner.flags.owndata else array.copy()

        return replace(self, inputs=tuple([replace(each, array=copied(each)) for each in self.inputs]))


class InferenceResponse(Struct, frozen=True, eq=False):
    """One response; a decoupled model sends any number. ``outputs`` has only the written outputs."""

    outputs: Mapping[str, Tensor]
    is_final: bool = True
    version: str = ""
    """The version of the model that answered."""
    is_behind: bool = False
    """Whether Triton keeps later responses, because earlier ones were not read in time."""
    choice: int = 0
    """The index of its request, if one answer has several requests."""
    early_exit: str | None = None
    """The reason why the engine itself ended the request early."""


FLOOR_S = 0.05
"""The shortest time in seconds for a request."""


class Deadline(Struct, frozen=True):
    """The time by which a request must end, on the monotonic clock. The value travels with the request."""

    expires_at: float
    """Seconds on ``time.monotonic``."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        return cls(time.monotonic() + max(seconds, FLOOR_S))

    def remaining_s(self) -> float:
        return max(0.0, self.expires_at - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self.expires_at


class IdleTimeout:
    """Raises TimeoutError from its block if :meth:`renew` is not called for ``idle_s`` seconds.

    Works like ``asyncio.timeout``, but is cheap to renew, for work with frequent events: :meth:`renew` only notes the
    time, and one timer serves many renewals.
    """

    __slots__ = ("_loop", "_since", "_timeout", "_timer", "idle_s")

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._since = math.inf
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.renew()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        self.change(self.idle_s)
        await self._timeout.__aexit__(*failure)

    def renew(self) -> None:
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self.idle_s, self._check)

    def change(self, idle_s: float) -> None:
        """Sets another time from the next :meth:`renew` on."""
        self.idle_s, self._since = idle_s, math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause(self) -> None:
        """Stops the timeout until the next :meth:`renew`."""
        self._since = math.inf

    def _check(self) -> None:
        self._timer = None
        idle_s = self._loop.time() - self._since
        if idle_s >= self.idle_s:
            self._timeout.reschedule(self._loop.time())
        elif self._since != math.inf:
            self._timer = self._loop.call_later(self.idle_s - idle_s, self._check)


ELEMENT = -4
"""Offset of the tensor if the whole memory is one BYTES element, whose length precedes it in 4 bytes.

Source: Open Inference Protocol, "Tensor Data"."""


class TensorMemory(Protocol):
    """Provides memory of an engine, from which a raw tensor reaches the model without a copy."""

    def take(self, size: int, tensor_at: int) -> memoryview | None:
        """Returns ``size`` bytes with arbitrary content; None if no memory is available.

        ``tensor_at``: the offset of the first tensor, so that it can be aligned; or ELEMENT.
        """

    def give_back(self, memory: memoryview) -> None:
        """Returns memory from :meth:`take`. Call this after the calls that used it, without remaining references."""
