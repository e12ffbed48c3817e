"""Log lines never block their writer; lines are dropped only when the buffer is full."""

import os
import subprocess
import sys
import threading
from select import PIPE_BUF

import pytest

from app.observability.log import LineWriter

PIPE_BYTES = 64 * 1024
"""The capacity of a pipe without a reader. Less fits while its first page is partly read."""


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


def test_the_thread_goes_on_after_any_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception other than OSError ended the thread, and no line was written any more."""
    reader, writer_end = os.pipe()
    failing, write = [MemoryError(), ValueError()], os.write

    def write_or_fail(descriptor: int, data: memoryview) -> int:
        if descriptor == writer_end and failing:
            raise failing.pop()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_or_fail)
    writer = LineWriter(writer_end)
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
from app.observability.log import LineWriter
letter = sys.argv[1].encode()
writer = LineWriter(2)
for n in range(2000):
    writer.write(letter * (n % 999) + b"\\n")
writer.flush(20)
"""


def test_lines_of_several_processes_are_not_mixed() -> None:
    """All lines together are larger than the kernel's limit for atomic writes to a pipe."""
    reader, writer_end = os.pipe()
    letters = b"ab"
    command = [sys.executable, "-c", WRITE_TO_STANDARD_ERROR]
    processes = [subprocess.Popen([*command, chr(letter)], stderr=writer_end) for letter in letters]
    expected = [bytes([letter]) * (n % 999) for letter in letters for n in range(2000)]
    lines = read_all(reader, sum(len(line) + 1 for line in expected)).splitlines()
    assert [process.wait(20) for process in processes] == [0, 0]
    assert sorted(lines) == sorted(expected)


def test_a_line_longer_than_a_write_is_written() -> None:
    reader, writer_end = os.pipe()
    writer = LineWriter(writer_end)
    lines = b"short\n" + b"x" * 2 * PIPE_BUF + b"\nshort\nshort\n"
    writer.write(lines)
    assert read_all(reader, len(lines)) == lines
