"""Log lines never block their writer; lines are dropped only when the buffer is full."""

import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from app.observability.log import LineWriter, turns_by

PIPE_BYTES = 64 * 1024
"""The capacity of a pipe without a reader. Less fits while its first page is partly read."""
PAGE_BYTES = 4096


def read_all(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(descriptor, 65536)
    return data


def test_lines_arrive_complete_and_in_order() -> None:
    reader, writer_end = os.pipe()
    writer = LineWriter(writer_end)
    lines = [b"%d\n" % n for n in range(5000)]
    for line in lines:
        writer.write(line)
    assert read_all(reader, sum(map(len, lines))) == b"".join(lines)
    assert writer.dropped == 0


def test_a_blocked_pipe_does_not_block_the_writer() -> None:
    reader, writer_end = os.pipe()
    writer = LineWriter(writer_end, max_waiting_bytes=100_000)
    line = b"x" * 999 + b"\n"
    for _ in range(1000):
        writer.write(line)
    assert writer.dropped > 0
    kept = 1000 - writer.dropped
    assert kept * 1000 <= 100_000 + PIPE_BYTES
    assert read_all(reader, kept * 1000) == line * kept
    writer.flush(20)
    writer.write(b"next\n")
    assert read_all(reader, 5) == b"next\n"


def test_lines_of_several_threads_are_not_mixed() -> None:
    reader, writer_end = os.pipe()
    writer = LineWriter(writer_end)

    def write(letter: bytes) -> None:
        for _ in range(500):
            writer.write(letter * 50 + b"\n")

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    lines = read_all(reader, 3 * 500 * 51).splitlines()
    for thread in threads:
        thread.join()
    assert sorted(set(lines)) == [b"a" * 50, b"b" * 50, b"c" * 50]


def test_the_thread_goes_on_after_any_exception() -> None:
    """An exception other than OSError ended the thread, and no line was written any more."""
    reader, writer_end = os.pipe()
    failing = [MemoryError(), ValueError()]

    @contextmanager
    def turn() -> Iterator[bool]:
        if failing:
            raise failing.pop()
        yield False

    writer = LineWriter(writer_end, turn=turn)
    for dropped in (1, 2):
        writer.write(b"lost\n")
        writer.flush(20)
        assert writer.dropped == dropped
    writer.write(b"next\n")
    writer.flush(20)
    assert (writer.dropped, os.read(reader, 100)) == (2, b"next\n")


def test_a_thread_that_cannot_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes holds for threads too."""
    reader, writer_end = os.pipe()
    writer = LineWriter(writer_end)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "_start_new_thread", _no_thread)
        writer.write(b"first\n")
    writer.write(b"second\n")
    writer.flush(20)
    assert os.read(reader, 100) == b"first\nsecond\n"


def _no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_closed_descriptor_drops_lines_without_an_error() -> None:
    reader, writer_end = os.pipe()
    os.close(reader)
    writer = LineWriter(writer_end)
    writer.write(b"lost\n")
    writer.flush(20)
    assert writer.dropped == 1


WRITE_TO_STANDARD_ERROR = """
import sys
from app.observability.log import LineWriter, turns_by
letter, lock = sys.argv[1].encode(), int(sys.argv[2])
writer = LineWriter(2, turn=turns_by(lock))
for n in range(60):
    writer.write(letter * 9999 + b"\\n")
writer.flush(20)
"""


def test_lines_of_several_processes_are_not_mixed() -> None:
    """Each write is larger than the kernel's limit for atomic writes to a pipe."""
    reader, writer_end = os.pipe()
    lock = os.memfd_create("lock")
    letters = b"ab"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE_TO_STANDARD_ERROR, chr(letter), str(lock)], stderr=writer_end, pass_fds=[lock]
        )
        for letter in letters
    ]
    lines = read_all(reader, len(letters) * 60 * 10_000).splitlines()
    assert [process.wait(20) for process in processes] == [0, 0]
    assert sorted(set(lines)) == [b"a" * 9999, b"b" * 9999]


def test_a_dead_process_releases_its_turn() -> None:
    lock = os.memfd_create("lock")
    script = (
        "import os, sys\n"
        "from app.observability.log import turns_by\n"
        "with turns_by(int(sys.argv[1]))(): os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(lock)], pass_fds=[lock], check=False)
    reader, writer_end = os.pipe()
    writer = LineWriter(writer_end, turn=turns_by(lock))
    writer.write(b"next\n")
    assert read_all(reader, 6) == b"\nnext\n"


def test_a_line_cut_off_by_a_kill_does_not_damage_the_next_one() -> None:
    """The pipe is full, so the first process is killed within its write."""
    reader, writer_end = os.pipe()
    lock = os.memfd_create("lock")
    command = [sys.executable, "-c", WRITE_TO_STANDARD_ERROR, "a", str(lock)]
    process = subprocess.Popen(command, stderr=writer_end, pass_fds=[lock])
    received = read_all(reader, 100_000)
    poll(lambda: waiting_bytes(reader) > PIPE_BYTES - PAGE_BYTES)
    process.kill()
    process.wait()
    writer = LineWriter(writer_end, turn=turns_by(lock))
    writer.write(b"next\n")
    while not received.endswith(b"next\n"):
        received += os.read(reader, 65536)
    *whole, cut_off, last = received.splitlines()
    assert set(whole) == {b"a" * 9999}
    assert cut_off == b"a" * len(cut_off)
    assert last == b"next"


def poll(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def waiting_bytes(reader: int) -> int:
    (size,) = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))
    return int(size)
