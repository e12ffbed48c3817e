"""What the benchmark orders of a load process, and what the process reports. All of them are pickled."""

from dataclasses import dataclass


class UnexpectedAnswer(Exception):
    """A peer answered otherwise than the benchmark expects, or in a form that the client cannot read."""


@dataclass(frozen=True)
class HttpAsk:
    """One HTTP POST. ``event`` stands once in each event of a stream, ``end`` after its last one."""

    path: str
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    status: int = 200
    """Of a good answer."""
    event: bytes = b""
    end: bytes = b""


@dataclass(frozen=True)
class TensorAsk:
    """``region``: of shared memory, which holds ``raw`` already; empty: ``raw`` is sent."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes
    region: str = ""


@dataclass(frozen=True)
class GrpcAsk:
    """One call of a Triton model. ``error``: the gRPC code of a good answer that is an error."""

    model: str
    inputs: tuple[TensorAsk, ...]
    error: str = ""
    interval_ms: int = 0
    """Between the responses of a stream."""


Ask = HttpAsk | GrpcAsk


@dataclass(frozen=True)
class Unary:
    """Calls for ``seconds``, at any time one for each of ``connections``."""

    ask: Ask
    connections: int
    seconds: float


@dataclass(frozen=True)
class Relay:
    """Streams, one after the other, for ``seconds``."""

    ask: Ask
    seconds: float


@dataclass(frozen=True)
class Hold:
    """Opens so many streams, and leaves them open."""

    ask: Ask
    streams: int


@dataclass(frozen=True)
class Drop:
    """Closes all streams that are held."""


Order = Unary | Relay | Hold | Drop


@dataclass(frozen=True)
class Report:
    """``durations``: of each unary call, in seconds. ``count``: of calls, of events or of open streams."""

    count: int = 0
    elapsed_s: float = 0.0
    durations: tuple[float, ...] = ()
