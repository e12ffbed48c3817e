"""The limits of kept streams: which stream is evicted first, and when nothing can be evicted."""

import pytest

from app.streams.store import KeepLimits, KeepQuota, KeptStream

KIB = 1024


def quota_of(max_kib: int = 1000, max_streams: int = 100) -> KeepQuota:
    return KeepQuota(KeepLimits(max_kib * KIB, max_streams))


def added(quota: KeepQuota, stream_id: str, caller: str = "", kib: int = 0, *, evictable: bool = True) -> KeptStream:
    kept = KeptStream(stream_id, caller)
    quota.add(kept)
    quota.grow(kept, kib * KIB)
    quota.mark(kept, evictable=evictable)
    return kept


def test_a_further_stream_must_fit_into_both_limits() -> None:
    by_count = quota_of(max_streams=2)
    added(by_count, "1")
    assert not by_count.is_over("", streams=1)
    added(by_count, "2")
    assert by_count.is_over("", streams=1)
    assert not by_count.is_over("")

    by_size = quota_of(max_kib=12)
    added(by_size, "1", kib=4)
    assert not by_size.is_over("", streams=1)
    added(by_size, "2", kib=1)
    assert by_size.is_over("")


VICTIMS: dict[str, tuple[KeepQuota, list[tuple[str, str, int, bool]], str, str]] = {
    "the oldest ended stream": (quota_of(max_streams=2), [("1", "", 0, False), ("2", "", 0, True)], "", "2"),
    "of a caller above its share, its own": (
        quota_of(max_streams=4),
        [("other", "b", 0, True), ("own-0", "a", 0, True), ("own-1", "a", 0, True)],
        "a",
        "own-0",
    ),
    "of the caller with the most bytes": (
        quota_of(max_kib=100),
        [("small", "a", 1, True), ("large-1", "b", 30, True), ("large-2", "b", 10, True), ("runs", "c", 45, False)],
        "d",
        "large-1",
    ),
}
"""The limits, the id, caller, KiB and evictability of each stream, who starts a further one, and what it evicts."""


@pytest.mark.parametrize("case", VICTIMS)
def test_the_stream_that_is_evicted_for_a_further_one(case: str) -> None:
    quota, streams, caller, expected = VICTIMS[case]
    for stream_id, of, kib, evictable in streams:
        added(quota, stream_id, of, kib, evictable=evictable)
    victim = quota.victim(caller, streams=1)
    assert quota.is_over(caller, streams=1)
    assert victim is not None
    assert victim.id == expected


def test_a_stream_that_is_read_again_becomes_the_newest() -> None:
    quota = quota_of(max_streams=2)
    first = added(quota, "1")
    added(quota, "2")
    for evictable in (False, True):
        quota.mark(first, evictable=evictable)
    victim = quota.victim("", streams=1)
    assert victim is not None
    assert victim.id == "2"


def test_running_streams_and_streams_with_readers_are_never_evicted() -> None:
    quota = quota_of(max_streams=1)
    added(quota, "running", evictable=False)
    assert quota.victim("", streams=1) is None
    assert "GATEWAY_MAX_KEPT_STREAMS" in (quota.refusal("").hint or "")


def test_the_refusal_of_a_key_names_its_share() -> None:
    quota = quota_of(max_streams=2)
    added(quota, "running", "a", evictable=False)
    assert "this API key" in quota.refusal("a").detail
