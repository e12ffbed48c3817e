"""The limits of kept streams: which stream is evicted first, and when nothing can be evicted."""

from app.streams.quota import STREAM_BYTES, KeepLimits, KeepQuota, KeptStream

KIB = 1024


def quota_of(max_kib: int = 1000, max_streams: int = 100) -> KeepQuota:
    return KeepQuota(KeepLimits(max_kib * KIB, max_streams))


def added(quota: KeepQuota, stream_id: str, caller: str = "", kib: int = 0, *, evictable: bool = True) -> KeptStream:
    kept = KeptStream(stream_id, caller)
    quota.add(kept)
    quota.grow(kept, kib * KIB)
    quota.mark(kept, evictable=evictable)
    return kept


def test_usage_is_the_sum_of_all_streams_and_returns_to_zero() -> None:
    quota = quota_of()
    streams = [added(quota, str(number), caller, kib=10) for number, caller in enumerate(["", "a", "b", "a"])]
    assert (quota.total.streams, quota.total.size) == (4, 4 * (STREAM_BYTES + 10 * KIB))
    for kept in streams:
        quota.remove(kept)
    assert (quota.total.streams, quota.total.size, quota.total.evictable) == (0, 0, {})


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


def test_the_oldest_ended_stream_is_evicted_first() -> None:
    quota = quota_of(max_streams=3)
    for stream_id in "123":
        added(quota, stream_id, evictable=stream_id != "1")
    victim = quota.victim("", streams=1)
    assert victim is not None
    assert victim.id == "2"


def test_a_stream_that_is_read_again_becomes_the_newest() -> None:
    quota = quota_of(max_streams=2)
    first = added(quota, "1")
    added(quota, "2")
    quota.mark(first, evictable=False)
    quota.mark(first, evictable=True)
    victim = quota.victim("", streams=1)
    assert victim is not None
    assert victim.id == "2"


def test_a_caller_above_its_share_loses_its_own_streams() -> None:
    quota = quota_of(max_streams=4)
    added(quota, "other", "b")
    for number in range(2):
        added(quota, f"own-{number}", "a")
    assert quota.is_over("a", streams=1)
    assert not quota.is_over("b", streams=1)
    victim = quota.victim("a", streams=1)
    assert victim is not None
    assert victim.id == "own-0"


def test_a_full_gateway_evicts_from_the_caller_with_the_most_bytes() -> None:
    quota = quota_of(max_kib=100)
    added(quota, "small", "a", kib=1)
    added(quota, "large-1", "b", kib=30)
    added(quota, "large-2", "b", kib=10)
    added(quota, "running", "c", kib=45, evictable=False)
    assert quota.is_over("d", streams=1)
    victim = quota.victim("d", streams=1)
    assert victim is not None
    assert victim.id == "large-1"


def test_running_streams_and_streams_with_readers_are_never_evicted() -> None:
    quota = quota_of(max_streams=1)
    added(quota, "running", evictable=False)
    assert quota.victim("", streams=1) is None
    assert "GATEWAY_MAX_KEPT_STREAMS" in (quota.refusal("").hint or "")


def test_the_refusal_of_a_key_names_its_share() -> None:
    quota = quota_of(max_streams=2)
    added(quota, "running", "a", evictable=False)
    assert "this API key" in quota.refusal("a").detail
