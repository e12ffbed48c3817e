"""The log on standard error: its lines are JSON objects or text, and never block their writer."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import BufferingHandler
from select import PIPE_BUF
from unittest.mock import Mock

import pytest
from prometheus_client import generate_latest

from app.core.inference import InferenceRequest
from app.observability.log import (
    JsonFormatter,
    LineWriter,
    LoggedCall,
    StructuredLogger,
    TextFormatter,
    configure_logging,
)
from app.observability.metrics import Metrics
from tests.toolkit.models import response, tensor

SCRIPT = """
import logging, sys
from app.observability.log import configure_logging
configure_logging("info", sys.argv[1], {"worker": int(number) for number in sys.argv[2:]})
log = logging.getLogger("some.where")
log.debug("unseen")
log.info("a line\\nand\\x00 \\u2028 more", extra={"request_id": "rid", "number": 1.5, "odd": object})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
logging.getLogger("httpx").info("unseen")
"""


def lines(style: str, *worker: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", SCRIPT, style, *worker], capture_output=True, text=True, check=True)
    assert run.stdout == ""
    return run.stderr.splitlines()


def test_the_lines_of_each_format() -> None:
    """A worker's lines have its number."""
    first, second = map(json.loads, lines("json"))
    assert first["message"] == "a line\nand\x00 \u2028 more"
    assert (first["level"], first["logger"], first["request_id"], first["number"]) == ("INFO", "some.where", "rid", 1.5)
    assert first["time"]
    assert "worker" not in first
    assert "ZeroDivisionError" in second["exc_info"]
    assert [json.loads(line)["worker"] for line in lines("json", "3")] == [3, 3]
    assert "INFO    some.where: a line" in lines("text")[0]
    assert "INFO    worker 3 some.where: a line" in lines("text", "3")[0]


def test_dropped_lines_are_counted_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = LineWriter(2, max_waiting_bytes=0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logging.getLogger("some.where").error("no room")
    metrics = Metrics("1.2.3")
    for _ in range(2):
        metrics.show_load({}, {}, {}, {})
    assert "triton_gateway_log_lines_dropped_total 1.0" in generate_latest(metrics.registry).decode()


REQUEST = {
    "request_id": "rid",
    "method": "POST",
    "path": "/v1/pipelines/ocr",
    "status": 200,
    "outcome": "ok",
    "duration_ms": 52.1,
}


FAILED = {"status": 502, "outcome": "model_error", "code": "model_error", "detail": "Step 'a' failed."}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (REQUEST | {"pipeline": "ocr"}, "POST /v1/pipelines/ocr 200 ocr ok 52.1 ms"),
        (
            REQUEST | FAILED | {"pipeline": "ocr", "triton_message": "a: no\nwords\x1b[2J"},
            "POST /v1/pipelines/ocr 502 ocr model_error 52.1 ms"
            " model_error: Step 'a' failed. The model's message: a: no words [2J [rid]",
        ),
        ({"msg": "draining", "in_flight": 1}, "draining"),
    ],
    ids=["a request", "a failed request, with its cause", "another message"],
)
def test_the_text_line_of_a_request_has_its_main_fields(fields: dict[str, object], line: str) -> None:
    record = {"name": "x", "msg": "request", "levelno": logging.INFO, "levelname": "INFO", **fields}
    written = TextFormatter().format(logging.makeLogRecord(record))
    assert written[len("2026-11-22 14:02:09,123 ") :] == f"INFO    x: {line}"


@pytest.mark.parametrize(
    ("style", "on_terminal", "formatter"),
    [
        ("auto", True, TextFormatter),
        ("auto", False, JsonFormatter),
        ("json", True, JsonFormatter),
        ("text", False, TextFormatter),
    ],
)
def test_the_format_is_text_on_a_terminal(
    style: str, on_terminal: bool, formatter: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    monkeypatch.setattr(logging.root, "handlers", [])
    assert type(configure_logging("warning", style).formatter) is formatter


FIELDS = {"request_id": "rid", "status": 200, "duration_ms": 1.25, "detail": "\u00e9\n\u2028", "triton_code": None}


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A separate logger for each test."""
    return f"structured {request.node.name}"


def json_log(monkeypatch: pytest.MonkeyPatch) -> tuple[LineWriter, list[bytes]]:
    """Replaces the handlers of the root logger. Returns the new handler and the list of its lines."""
    handler, lines = LineWriter(2), list[bytes]()
    handler.setFormatter(JsonFormatter())
    monkeypatch.setattr(handler, "write", lines.append)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    return handler, lines


def without_time(line: bytes) -> bytes:
    text, replaced = re.subn(rb'"time":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?\+00:00"', b'"time":""', line)
    assert replaced == 1
    return text


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
@pytest.mark.parametrize("fields", [FIELDS, {}, {"detail": "\ud800", "number": 1 << 70}])
def test_a_line_is_the_same_with_and_without_a_record(
    name: str, monkeypatch: pytest.MonkeyPatch, level: int, fields: dict[str, object]
) -> None:
    _, written = json_log(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(logging.Logger, "handle", None)
        StructuredLogger(name).log(level, "request", fields)
    logging.getLogger(name).log(level, "request", extra=fields)
    direct, through_logging = map(without_time, written)
    assert direct == through_logging
    assert json.loads(direct) == {"time": "", "level": logging.getLevelName(level), "logger": name} | {
        "message": "request",
        **fields,
    }


@pytest.mark.parametrize(
    "place", [lambda name: logging.root, logging.getLogger, lambda name: logging.getLogger("above")]
)
def test_another_handler_gets_the_record_once(
    name: str, monkeypatch: pytest.MonkeyPatch, place: Callable[[str], logging.Logger]
) -> None:
    _, written = json_log(monkeypatch)
    log, seen = StructuredLogger(f"above.{name}"), BufferingHandler(100)
    logger = place(f"above.{name}")
    logger.addHandler(seen)
    log.log(logging.INFO, "request", FIELDS)
    logger.removeHandler(seen)
    (record,) = seen.buffer
    assert vars(record)["request_id"] == "rid"
    assert len(written) == 1


@pytest.mark.parametrize("of_handler", [True, False])
def test_filters_are_applied(name: str, monkeypatch: pytest.MonkeyPatch, of_handler: bool) -> None:
    handler, written = json_log(monkeypatch)
    filtered = handler if of_handler else logging.getLogger(name)
    filtered.addFilter(lambda record: record.getMessage() != "request")
    StructuredLogger(name).log(logging.INFO, "request", FIELDS)
    assert written == []


def test_another_formatter_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, written = json_log(monkeypatch)
    handler.setFormatter(logging.Formatter("%(levelname)-7s %(name)s: %(message)s"))
    StructuredLogger(name).log(logging.INFO, "request", FIELDS)
    assert written == [f"INFO    {name}: request\n".encode()]


PIPE_BYTES = 64 * 1024
"""The capacity of a pipe without a reader. Less fits while its first page is partly read."""


def read_all(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(descriptor, 65536)
    return data


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer_end = os.pipe()
    yield reader, writer_end
    for each in (reader, writer_end):
        os.close(each)


def test_lines_arrive_complete_and_in_order(pipe: tuple[int, int]) -> None:
    """Also a line that is longer than a write."""
    reader, writer_end = pipe
    writer = LineWriter(writer_end)
    lines = [b"short\n" + b"x" * 2 * PIPE_BUF + b"\nshort\nshort\n", *(b"%d\n" % n for n in range(5000))]
    for line in lines:
        writer.write(line)
    assert read_all(reader, sum(map(len, lines))) == b"".join(lines)
    assert writer.dropped == 0


def test_a_blocked_pipe_does_not_block_the_writer(pipe: tuple[int, int]) -> None:
    reader, writer_end = pipe
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


def test_lines_of_several_threads_are_not_mixed(pipe: tuple[int, int]) -> None:
    reader, writer_end = pipe
    writer = LineWriter(writer_end)

    def write(letter: bytes) -> None:
        for _ in range(500):
            writer.write(letter * 50 + b"\n")

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, (b"a", b"b", b"c")))
    lines = read_all(reader, 3 * 500 * 51).splitlines()
    assert sorted(set(lines)) == [b"a" * 50, b"b" * 50, b"c" * 50]


def test_the_thread_goes_on_after_any_exception(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception other than OSError ended the thread, and no line was written any more."""
    reader, writer_end = pipe
    failing, write = [MemoryError(), ValueError(), BrokenPipeError()], os.write

    def write_or_fail(descriptor: int, data: memoryview) -> int:
        if descriptor == writer_end and failing:
            raise failing.pop()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_or_fail)
    writer = LineWriter(writer_end)
    for dropped in (1, 2, 3):
        writer.write(b"lost\n")
        writer.flush(20)
        assert writer.dropped == dropped
    writer.write(b"next\n")
    writer.flush(20)
    assert (writer.dropped, os.read(reader, 100)) == (3, b"next\n")


def test_a_thread_that_cannot_start_is_started_later(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes holds for threads too."""
    reader, writer_end = pipe
    writer = LineWriter(writer_end)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "_start_new_thread", Mock(side_effect=RuntimeError("can't start new thread")))
        writer.write(b"first\n")
    writer.write(b"second\n")
    writer.flush(20)
    assert os.read(reader, 100) == b"first\nsecond\n"


WRITE_TO_STANDARD_ERROR = """
import sys
from app.observability.log import LineWriter
letter = sys.argv[1].encode()
writer = LineWriter(2)
for n in range(2000):
    writer.write(letter * (n % 999) + b"\\n")
writer.flush(20)
"""


def test_lines_of_several_processes_are_not_mixed(pipe: tuple[int, int]) -> None:
    """All lines together are larger than the kernel's limit for atomic writes to a pipe."""
    reader, writer_end = pipe
    letters = b"ab"
    command = [sys.executable, "-c", WRITE_TO_STANDARD_ERROR]
    processes = [subprocess.Popen([*command, chr(letter)], stderr=writer_end) for letter in letters]
    expected = [bytes([letter]) * (n % 999) for letter in letters for n in range(2000)]
    lines = read_all(reader, sum(len(line) + 1 for line in expected)).splitlines()
    assert [process.wait(20) for process in processes] == [0, 0]
    assert sorted(lines) == sorted(expected)


RESPONSE = response(tensor("Y", "FP32", [41.5, 42.5]), tensor("T", "BYTES", [b"secret"]))
CALLED = InferenceRequest("m", (), request_id="rid")


def test_each_response_is_logged_as_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triton_gateway.tensors"):
        stream = LoggedCall(CALLED, "ModelStreamInfer")
        stream.response(RESPONSE)
        stream.response(RESPONSE)
        LoggedCall(CALLED, "ModelInfer").response(RESPONSE)
    lines = [vars(record) for record in caplog.records]
    assert [line["response"] for line in lines] == [1, 2, 1]
    assert {line["tensors"] for line in lines} == {"Y:FP32[2] T:BYTES[1]"}
    assert {line["triton_request_id"] for line in lines} == {"rid"}
    assert "secret" not in repr(lines)
