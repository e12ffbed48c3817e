"""The orders for a load process, and its reports. All of them are pickled."""

from dataclasses import dataclass, field


class UnexpectedAnswer(Exception):
    """A server answered otherwise than the benchmark expects, or in a form that the client cannot read."""


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
    parameters: tuple[tuple[str, int], ...] = ()


Ask = HttpAsk | SocketAsk | GrpcAsk


@dataclass(frozen=True)
class Unary:
    """Calls for ``seconds``, at any time one for each of ``asks``, which are of one kind."""

    asks: tuple[Ask, ...]
    seconds: float


@dataclass(frozen=True)
class Relay:
    """For ``seconds``, a reader for each of ``asks`` reads one stream after the other.

    The readers start evenly distributed over ``starts_s``.
    """

    asks: tuple[HttpAsk | GrpcAsk, ...]
    seconds: float
    starts_s: float = 0.0


@dataclass(frozen=True)
class Hold:
    """Opens this number of streams, and leaves them open."""

    ask: HttpAsk | GrpcAsk
    streams: int


@dataclass(frozen=True)
class Drop:
    """Closes all streams that are held."""


@dataclass(frozen=True)
class Flood:
    """Sends requests at a steady rate, regardless of the answers. Answers during the warm-up do not count."""

    ask: HttpAsk
    rate: float
    warm_up_s: float
    seconds: float
    tick_s: float = 0.005
    """The requests of this time are sent together."""


@dataclass(frozen=True)
class Obedient:
    """Callers who each ask once in ``pause_s``. After a 429 they wait as ``Retry-After`` says, if they obey."""

    ask: HttpAsk
    callers: int
    pause_s: float
    warm_up_s: float
    seconds: float
    obeys: bool = True


Order = Unary | Relay | Hold | Drop | Flood | Obedient


@dataclass(frozen=True)
class Report:
    """``count``: of calls, of events or of open streams.

    ``durations``: of each call, or until the first event of each stream, in seconds.
    ``longest_gap_s``: between two reads of a stream, after its first 50.
    """

    count: int = 0
    elapsed_s: float = 0.0
    durations: tuple[float, ...] = ()
    longest_gap_s: float = 0.0


@dataclass
class Answers:
    """Answers to a flood. ``good_s``, ``refused_s``: their durations.

    ``statuses``: answers by HTTP status, 0 for a closed connection.
    """

    seconds: float
    asked: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    good_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)

    def add(self, status: int, took_s: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status in (200, 201):
            self.good_s.append(took_s)
        elif status == 429:
            self.refused_s.append(took_s)


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
