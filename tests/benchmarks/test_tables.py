"""Tables and charts of the peers, from invented samples."""

from dataclasses import replace

from benchmarks.peers.every import PEERS
from benchmarks.peers.figures import figures_of
from benchmarks.peers.found import Found
from benchmarks.peers.gateway import NAME as GATEWAY
from benchmarks.peers.measuring import Sample
from benchmarks.peers.plain_fastapi import NAME as PLAIN
from benchmarks.peers.reach import reach_table
from benchmarks.peers.tables import repeated_tables, workload_table
from benchmarks.peers.workloads import SMALL_32, WORKLOADS

SAMPLE = Sample(1000, 2, 3, 100, 50, 10, 64)


def found_with(**of_gateway: float) -> Found:
    """Returns two rounds with equal figures for every peer, except the gateway at 32 connections of small requests."""
    found = Found(idle_kib={GATEWAY: [20.0]})
    for workload in WORKLOADS:
        for peer in PEERS:
            own = of_gateway if (workload, peer) == (SMALL_32, GATEWAY) else {}
            for factor in (1, 2):
                found.add(workload, peer, replace(SAMPLE, rate=factor * SAMPLE.rate, **own))
    return found


def row_of(table: object, start: str) -> str:
    return next(line for line in str(table).splitlines() if line.startswith(f"| {start}"))


def test_a_goal_is_missed_reached_or_exceeded() -> None:
    rate, cpu = "requests/s of small JSON, 32 connections, against plain", "CPU for a small request"
    for peer_us, verdict in ((60, "**missed**"), (50, "reached"), (35, "aim reached")):
        assert row_of(reach_table(found_with(peer_us=peer_us)), cpu).endswith(f"| 0.5x | 0.35x | {verdict} |")
    for factor, verdict in ((1.9, "**missed**"), (2.0, "reached"), (2.5, "aim reached")):
        found = Found()
        found.add(SMALL_32, PLAIN, SAMPLE)
        found.add(SMALL_32, GATEWAY, replace(SAMPLE, rate=factor * SAMPLE.rate))
        assert row_of(reach_table(found), rate).endswith(f"| 2x | 2.5x | {verdict} |")


def test_a_workload_has_a_row_for_each_peer_in_order() -> None:
    lines = str(workload_table(SMALL_32, found_with())).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[-len(PEERS) :]] == list(PEERS)


def test_repeated_measurements_are_listed_if_there_are_any() -> None:
    found = found_with()
    assert repeated_tables(found) == []
    found.repeated.append((SMALL_32.title, GATEWAY, "TimeoutError"))
    (table,) = repeated_tables(found)
    assert row_of(table, SMALL_32.title).endswith("| this gateway | TimeoutError |")


def test_the_same_figures_give_the_same_charts() -> None:
    first, second = figures_of(found_with()), figures_of(found_with())
    assert [each.svg for each in first] == [each.svg for each in second]
    assert all(each.svg.rstrip().endswith("</svg>") and GATEWAY in each.svg for each in first)
    assert all(len(each.svg) < 40_000 for each in first)
