"""The workloads: the request and the number of connections. To add a workload, add a line here."""

from dataclasses import dataclass

from benchmarks.peers.contents import INSIGHTS


@dataclass(frozen=True)
class Workload:
    """``ask``: the key in a peer's requests. ``is_stream``: count the events of streams instead of requests.

    ``keeps_awake``: idle processors do not halt during the measurement.
    """

    title: str
    ask: str
    connections: int = 1
    is_stream: bool = False
    keeps_awake: bool = False

    @property
    def unit(self) -> str:
        return "event" if self.is_stream else "request"


SMALL_1 = Workload("Small JSON (4 floats), 1 connection", "small")
SMALL_32 = Workload("Small JSON (4 floats), 32 connections", "small", 32)
SMALL_256 = Workload("Small JSON (4 floats), 256 connections", "small", 256)
LARGE = Workload("Large JSON (150,528 floats both ways), 1 connection", "large")
FILE = Workload("Image upload (200 KB), 1 connection", "file")
BINARY_1 = Workload("Binary body (1 MiB), 1 connection", "1 MiB")
BINARY_16 = Workload("Binary body (16 MiB), 1 connection", "16 MiB")
EARLY_EXIT = Workload("Early exit of the OCR pipeline (blank image), 1 connection", "early exit")
INSIGHTS_64 = tuple(Workload(f"`{name}`, 64 connections", name, 64) for name in INSIGHTS)
STREAM = Workload("Streams of 5,000 events, 1 at a time", "stream", is_stream=True)
STREAM_AWAKE = Workload(
    "Streams of 5,000 events, 1 at a time, processors kept awake", "stream", is_stream=True, keeps_awake=True
)
STREAMS = (STREAM, STREAM_AWAKE)

WORKLOADS = (SMALL_1, SMALL_32, SMALL_256, LARGE, FILE, BINARY_1, BINARY_16, EARLY_EXIT, *INSIGHTS_64, *STREAMS)
