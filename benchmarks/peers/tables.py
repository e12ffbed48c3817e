"""The tables of the peers: one for each workload."""

from benchmarks.peers import grpc_client, triton_http
from benchmarks.peers.every import PEERS
from benchmarks.peers.found import Found, Spread
from benchmarks.peers.measuring import Sample
from benchmarks.peers.workloads import Workload
from benchmarks.table import Table

NONE = "-"


def workload_table(workload: Workload, found: Found) -> Table:
    unit = workload.unit
    latency = [] if workload.is_stream else ["p50, ms", "p99, ms"]
    cpu = [f"CPU µs, {process}" for process in ("peer", "Triton", "load")]
    rows = [_row(workload, name, found.samples[workload][name]) for name in PEERS if found.has(workload, name)]
    return Table(workload.title, ["peer", f"{unit}s/s", *latency, *cpu, "memory, MiB"], rows, f"CPU: for one {unit}.")


def _row(workload: Workload, peer: str, samples: list[Sample]) -> list[str]:
    """The figures of the peer have a spread; those that only explain them are medians, which keeps the table narrow."""

    def spread(figure: str) -> Spread:
        return Spread(tuple(getattr(sample, figure) for sample in samples))

    def median(figure: str) -> str:
        return f"{spread(figure).median:,.0f}"

    latency = [] if workload.is_stream else [spread("p50_ms").text(2), spread("p99_ms").text(2)]
    peer_cpu = NONE if peer == triton_http.NAME else spread("peer_us").text()
    load_cpu = NONE if peer == grpc_client.NAME else median("load_us")
    return [peer, spread("rate").text(), *latency, peer_cpu, median("triton_us"), load_cpu, median("rss_mib")]


def idle_table(found: Found) -> Table:
    rows = [[peer, Spread(tuple(values)).text(1)] for peer, values in found.idle_kib.items()]
    note = "Resident memory that each open, silent stream adds to the peer's process, including its call to Triton."
    return Table("Idle streams", ["peer", "KiB a stream"], rows, note)


def repeated_tables(found: Found) -> list[Table]:
    """Returns one table; none if no measurement failed."""
    columns = ["workload", "peer", "error"]
    return [Table("Measurements that failed and were repeated", columns, found.repeated)] if found.repeated else []
