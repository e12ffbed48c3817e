"""The orders for a load process, and its reports. All of them are pickled."""

from dataclasses import dataclass


class UnexpectedAnswer(Exception):
    """A peer answered otherwise than the benchmark expects, or in a form that the client cannot read."""


@dataclass(frozen=True)
class HttpAsk:
    """One HTTP POST. ``event`` occurs once in each event of a stream, ``end`` after the last event."""

    path: str
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    status: int = 200
    """The status of a successful answer."""
    event: bytes = b""
    end: bytes = b""


@dataclass(frozen=True)
class SocketAsk:
    """One text message to a WebSocket. ``last`` occurs in the last event of its answer, and in no other."""

    path: str
    message: bytes
    last: bytes


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
    sequence_id: int = 0
    """Of a sequence that has started; 0: none."""


Ask = HttpAsk | SocketAsk | GrpcAsk


@dataclass(frozen=True)
class Unary:
    """Calls for ``seconds``, at any time one for each of ``connections``."""

    ask: Ask
    connections: int
    seconds: float


@dataclass(frozen=True)
class Each:
    """Calls for ``seconds``, at any time one for each of ``asks``, which are of one kind."""

    asks: tuple[Ask, ...]
    seconds: float


@dataclass(frozen=True)
class Relay:
    """Streams, one after the other, for ``seconds``."""

    ask: Ask
    seconds: float


@dataclass(frozen=True)
class Hold:
    """Opens this number of streams, and leaves them open."""

    ask: Ask
    streams: int


@dataclass(frozen=True)
class Drop:
    """Closes all streams that are held."""


@dataclass(frozen=True)
class Flood:
    """Sends requests at a steady rate, regardless of the answers. Answers during the warm-up do not count."""

    ask: Ask
    rate: float
    warm_up_s: float
    seconds: float
    tick_s: float = 0.005
    """The requests of this time are sent together."""
    drain_s: float = 0.0
    """How long to wait for the last answers before the connections are closed."""


@dataclass(frozen=True)
class Obedient:
    """Callers who each ask once in ``pause_s``. After a 429 they wait as ``Retry-After`` says, if they obey."""

    ask: HttpAsk
    callers: int
    pause_s: float
    warm_up_s: float
    seconds: float
    obeys: bool = True


Order = Unary | Each | Relay | Hold | Drop | Flood | Obedient


@dataclass(frozen=True)
class Report:
    """``durations``: of each unary call, in seconds. ``count``: of calls, of events or of open streams."""

    count: int = 0
    elapsed_s: float = 0.0
    durations: tuple[float, ...] = ()


@dataclass(frozen=True)
class Answers:
    """Answers to a flood. ``good_s``, ``refused_s``: their durations.

    ``statuses``: answers by HTTP status, 0 for a closed connection or a failed gRPC call.
    """

    asked: int
    seconds: float
    statuses: dict[int, int]
    good_s: tuple[float, ...]
    refused_s: tuple[float, ...]


def request_of(ask: HttpAsk) -> bytes:
    """Returns the bytes of the request."""
    lines = [
        f"POST {ask.path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Type: {ask.content_type}",
        f"Content-Length: {len(ask.body)}",
        *(f"{name}: {value}" for name, value in ask.headers),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + ask.body
