"""The charts of the peers."""

from collections.abc import Mapping

from benchmarks.figure import Figure, bars
from benchmarks.peers import gateway_wire
from benchmarks.peers.every import PEERS
from benchmarks.peers.found import Figure as Value
from benchmarks.peers.found import Found, Spread
from benchmarks.peers.reach import CPU, P50, RATE
from benchmarks.peers.workloads import FILE, LARGE, SMALL_1, SMALL_32, SMALL_256, STREAM, STREAM_AWAKE, Workload

SMALL = {"1 connection": SMALL_1, "32 connections": SMALL_32, "256 connections": SMALL_256}
SINGLE = {"large JSON": LARGE, "image upload": FILE}
STREAMED = {"as it is": STREAM, "processors kept awake": STREAM_AWAKE}


def figures_of(found: Found) -> list[Figure]:
    return [
        bars("Small JSON: requests per second", "small-rate.svg", list(SMALL), _spreads(SMALL, RATE, found)),
        bars("Small JSON: µs of the peer's CPU a request", "small-cpu.svg", list(SMALL), _spreads(SMALL, CPU, found)),
        bars("One connection: p50, ms", "one-connection.svg", list(SINGLE), _spreads(SINGLE, P50, found)),
        bars("Streams: events per second", "stream-rate.svg", list(STREAMED), _spreads(STREAMED, RATE, found)),
    ]


def _spreads(workloads: Mapping[str, Workload], value: Value, found: Found) -> dict[str, list[Spread | None]]:
    return {
        peer: [found.spread(each, peer, value) if found.has(each, peer) else None for each in workloads.values()]
        for peer in PEERS
        if peer != gateway_wire.NAME
    }
