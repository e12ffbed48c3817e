"""Log lines never block their writer, and none is lost as long as there is room."""

import os
import threading

from app.observability.lines import LineWriter

PIPE_BYTES = 64 * 1024
"""What a pipe without a reader takes."""


def read_all(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(descriptor, 65536)
    return data


def test_lines_arrive_whole_and_in_order() -> None:
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


def test_a_closed_descriptor_loses_lines_and_nothing_else() -> None:
    reader, writer_end = os.pipe()
    os.close(reader)
    writer = LineWriter(writer_end)
    writer.write(b"lost\n")
    writer.flush(20)
    assert writer.dropped == 1
