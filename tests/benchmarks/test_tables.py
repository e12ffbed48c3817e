"""Tables and charts of the peers, from invented samples."""

from dataclasses import replace

from benchmarks.compare import Found, Sample
from benchmarks.peers.run import COMPARISON, SMALL_32, WORKLOADS
from benchmarks.peers.servers import GATEWAY, PEERS, PLAIN

SAMPLE = Sample(1000, 2, 3, 100, 50)


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
        assert row_of(COMPARISON.goals_table(found_with(peer_us=peer_us)), cpu).endswith(
            f"| 0.5x | 0.35x | {verdict} |"
        )
    for factor, verdict in ((1.9, "**missed**"), (2.0, "reached"), (2.5, "aim reached")):
        found = Found()
        found.add(SMALL_32, PLAIN, SAMPLE)
        found.add(SMALL_32, GATEWAY, replace(SAMPLE, rate=factor * SAMPLE.rate))
        assert row_of(COMPARISON.goals_table(found), rate).endswith(f"| 2x | 2.5x | {verdict} |")


def test_a_workload_has_a_row_for_each_peer_in_order() -> None:
    lines = str(COMPARISON.table(SMALL_32, found_with())).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[-len(PEERS) :]] == list(PEERS)


def test_repeated_measurements_are_listed_if_there_are_any() -> None:
    found = found_with()
    assert "Repeated" not in str(COMPARISON.results(found)[-1])
    found.repeated.append((SMALL_32.title, GATEWAY, "TimeoutError"))
    assert row_of(COMPARISON.results(found)[-1], SMALL_32.title).endswith("| this gateway | TimeoutError |")


def test_the_same_figures_give_the_same_charts() -> None:
    first, second = ([chart.drawn(list(PEERS), found_with()) for chart in COMPARISON.charts] for _ in range(2))
    assert [each.svg for each in first] == [each.svg for each in second]
    assert all(each.svg.rstrip().endswith("</svg>") and GATEWAY in each.svg for each in first)
    assert all(len(each.svg) < 40_000 for each in first)
