"""A StructuredLogger writes the same lines as ``logging``, and creates a LogRecord only if necessary."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import count

import pytest

from app.observability.log import JsonFormatter, LineHandler, LineWriter, StructuredLogger

SCRIPT = """
import logging, sys
from app.observability.log import configure_logging
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord

def no_record(*given, **named):
    raise AssertionError("a LogRecord was made")

configure_logging("info", "json", {"worker": int(number) for number in sys.argv[1:]})
logging.setLogRecordFactory(no_record)
RequestRecord("rid", "POST", "/v1/pipelines/p", pipeline="p", transport="unary", status=200).close(Metrics("1.2.3"))
"""
FIELDS = {"request_id": "rid", "status": 200, "duration_ms": 1.25, "detail": "\u00e9\n\u2028", "triton_code": None}
_numbers = count()


@pytest.fixture
def name() -> str:
    """A separate logger for each test."""
    return f"structured{next(_numbers)}"


def json_log(monkeypatch: pytest.MonkeyPatch) -> tuple[LineHandler, list[bytes]]:
    """Replaces the handlers of the root logger. Returns the new handler and the list of its lines."""
    handler, lines = LineHandler(LineWriter(2)), list[bytes]()
    handler.setFormatter(JsonFormatter())
    monkeypatch.setattr(handler.writer, "write", lines.append)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    return handler, lines


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Every record that ``logging`` handles."""
    handled: list[logging.LogRecord] = []
    handle = logging.Logger.handle

    def noted(logger: logging.Logger, record: logging.LogRecord) -> None:
        handled.append(record)
        handle(logger, record)

    monkeypatch.setattr(logging.Logger, "handle", noted)
    return handled


def without_time(line: bytes) -> bytes:
    text, replaced = re.subn(rb'"time":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?\+00:00"', b'"time":""', line)
    assert replaced == 1
    return text


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
@pytest.mark.parametrize("fields", [FIELDS, {}, {"detail": "\ud800", "number": 1 << 70}])
def test_a_line_is_the_same_with_and_without_a_record(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    records: list[logging.LogRecord],
    level: int,
    fields: dict[str, object],
) -> None:
    _, written = json_log(monkeypatch)
    StructuredLogger(name).log(level, "request", fields)
    assert records == []
    logging.getLogger(name).log(level, "request", extra=fields)
    assert len(records) == 1
    direct, through_logging = map(without_time, written)
    assert direct == through_logging
    assert json.loads(direct) == {"time": "", "level": logging.getLevelName(level), "logger": name} | {
        "message": "request",
        **fields,
    }


def test_the_logger_tells_which_levels_are_enabled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    json_log(monkeypatch)
    log = StructuredLogger(name)
    assert (log.is_enabled_for(logging.DEBUG), log.is_enabled_for(logging.INFO)) == (False, True)


class Seen(logging.Handler):
    """A handler of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize(
    "place", [lambda name: logging.root, logging.getLogger, lambda name: logging.getLogger("above")]
)
def test_another_handler_gets_the_record_once(
    name: str, monkeypatch: pytest.MonkeyPatch, place: Callable[[str], logging.Logger]
) -> None:
    _, written = json_log(monkeypatch)
    log, seen = StructuredLogger(f"above.{name}"), Seen()
    logger = place(f"above.{name}")
    logger.addHandler(seen)
    log.log(logging.INFO, "request", FIELDS)
    logger.removeHandler(seen)
    (record,) = seen.records
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


def test_a_request_is_logged_without_a_record() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, "3"], capture_output=True, text=True, check=True)
    line = json.loads(run.stderr)
    assert (line["logger"], line["request_id"], line["worker"]) == ("triton_gateway.request", "rid", 3)
