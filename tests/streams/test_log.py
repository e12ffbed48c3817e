"""The log for one live reader, and the log that can be replayed after a reconnect."""

import asyncio

import pytest

from app.core.errors import StreamEvicted
from app.streams.events import MAX_READ_BYTES, Event, LiveLog, ReplayLog


def output(number: int, size: int = 10) -> Event:
    return Event(number, "output", b"x" * size)


def done(number: int) -> Event:
    return Event(number, "done", b"{}")


def ids(events: list[Event]) -> list[int]:
    return [event.id for event in events]


class TestLive:
    async def test_a_read_returns_all_unread_events_once(self) -> None:
        log = LiveLog()
        log.append(output(1))
        log.append(output(2))
        assert ids(await log.read(0)) == [1, 2]
        log.append(done(3))
        assert ids(await log.read(2)) == [3]

    async def test_a_read_timeout_loses_no_events(self) -> None:
        log = LiveLog()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await log.read(0)
        log.append(output(1))
        assert ids(await log.read(0)) == [1]

    async def test_a_full_log_has_room_after_its_events_are_sent(self) -> None:
        log = LiveLog(max_unread_bytes=25)
        log.append(output(1))
        assert not log.is_full
        log.append(output(2))
        assert log.is_full
        waiting = asyncio.create_task(log.room())
        assert ids(await log.read(0)) == [1, 2]
        await asyncio.sleep(0)
        assert not waiting.done()
        reading = asyncio.create_task(log.read(2))
        await waiting
        log.append(output(3))
        assert ids(await reading) == [3]

    async def test_one_read_is_limited_in_size(self) -> None:
        log = LiveLog(max_unread_bytes=10 * MAX_READ_BYTES)
        for number, size in enumerate((MAX_READ_BYTES - 10, 10, 1, 2 * MAX_READ_BYTES, 1), 1):
            log.append(output(number, size))
        assert [ids(await log.read(0)) for _ in range(4)] == [[1, 2], [3], [4], [5]]

    async def test_one_output_of_any_size_and_the_terminal_event_always_have_room(self) -> None:
        log = LiveLog(max_unread_bytes=20)
        assert not log.is_full
        log.append(output(1, 100))
        assert log.is_full
        log.append(done(2))
        assert ids(await log.read(0)) == [1, 2]

    async def test_read_events_count_until_the_next_read(self) -> None:
        log = LiveLog(max_unread_bytes=10 * MAX_READ_BYTES)
        log.append(output(1, 6 * MAX_READ_BYTES))
        log.append(output(2, 4 * MAX_READ_BYTES))
        assert log.is_full
        for number in (1, 2):
            assert ids(await log.read(number - 1)) == [number]
            assert log.is_full is (number == 1)


class TestReplay:
    async def test_all_waiting_readers_get_an_event(self) -> None:
        log = ReplayLog()
        readers = [asyncio.create_task(log.read(0)) for _ in range(3)]
        await asyncio.sleep(0)
        log.append(output(1))
        assert [ids(await each) for each in readers] == [[1]] * 3

    async def test_reading_dropped_events_raises_stream_evicted(self) -> None:
        log = ReplayLog(max_bytes=25)
        for number in range(1, 5):
            log.append(output(number))
        assert ids(await log.read(2)) == [3, 4]
        with pytest.raises(StreamEvicted):
            await log.read(1)
        with pytest.raises(StreamEvicted):
            log.resume(0)

    async def test_a_read_of_a_long_log_is_limited(self) -> None:
        log = ReplayLog()
        for number in range(1, 8):
            log.append(output(number, 100_000))
        log.append(done(8))
        assert [ids(await log.read(after)) for after in (0, 2, 6, 7)] == [[1, 2], [3, 4], [7, 8], [8]]

    @pytest.mark.parametrize("after", [0, 1, 4_000, 9_000, 9_999])
    async def test_reads_continue_after_any_event(self, after: int) -> None:
        log = ReplayLog()
        for number in range(1, 10_001):
            log.append(output(number))
        log.append(done(10_001))
        found: list[int] = []
        while not found or found[-1] < 10_001:
            found += ids(await log.read(found[-1] if found else after))
        assert found == list(range(after + 1, 10_002))

    async def test_an_event_above_the_limit_is_kept_alone(self) -> None:
        log = ReplayLog(max_bytes=25)
        log.append(output(1))
        log.append(output(2, 100))
        assert ids(await log.read(1)) == [2]
        log.append(done(3))
        assert ids(await log.read(1)) == [2, 3]

    def test_a_running_stream_can_resume_at_its_newest_event(self) -> None:
        log = ReplayLog()
        assert log.resume(0)
        log.append(output(1))
        assert log.resume(1)
