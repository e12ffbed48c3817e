"""Every log line on standard error is one JSON object."""

import json
import logging
import os
import subprocess
import sys

import pytest
from prometheus_client import generate_latest

from app.observability.log import JsonFormatter, LineHandler, LineWriter, TextFormatter, formatter_of
from app.observability.metrics import Metrics

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


def test_json_format_writes_one_object_per_line() -> None:
    first, second = map(json.loads, lines("json"))
    assert first["message"] == "a line\nand\x00 \u2028 more"
    assert (first["level"], first["logger"], first["request_id"], first["number"]) == ("INFO", "some.where", "rid", 1.5)
    assert first["time"]
    assert "ZeroDivisionError" in second["exc_info"]


def test_text_format_is_readable() -> None:
    assert "INFO    some.where: a line" in lines("text")[0]


def test_the_lines_of_a_worker_have_its_number() -> None:
    assert [json.loads(line)["worker"] for line in lines("json", "3")] == [3, 3]
    assert "INFO    worker 3 some.where: a line" in lines("text", "3")[0]
    assert "worker" not in lines("json")[0]


def test_dropped_lines_are_counted_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, descriptor = os.pipe()
    handler = LineHandler(LineWriter(descriptor, max_waiting_bytes=0))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logging.getLogger("some.where").error("no room")
    metrics = Metrics("1.2.3")
    for _ in range(2):
        metrics.show_load({}, {}, {}, {})
    assert "triton_gateway_log_lines_dropped_total 1.0" in generate_latest(metrics.registry).decode()
    os.close(reader)
    os.close(descriptor)


REQUEST = {
    "request_id": "rid",
    "method": "POST",
    "path": "/v1/pipelines/ocr",
    "status": 200,
    "outcome": "ok",
    "duration_ms": 52.1,
}


def text_of(**fields: object) -> str:
    record = logging.makeLogRecord(
        {"name": "x", "msg": "request", "levelno": logging.INFO, "levelname": "INFO", **fields}
    )
    return TextFormatter().format(record)[len("2026-11-22 14:02:09,123 ") :]


def test_the_text_line_of_a_request_has_its_main_fields() -> None:
    assert text_of(**REQUEST, pipeline="ocr") == "INFO    x: POST /v1/pipelines/ocr 200 ocr ok 52.1 ms"


def test_the_text_line_of_a_failed_request_has_the_cause() -> None:
    failed = REQUEST | {"status": 502, "outcome": "model_error", "code": "model_error", "detail": "Step 'a' failed."}
    assert text_of(**failed, pipeline="ocr", triton_message="a: no\nwords\x1b[2J").endswith(
        "502 ocr model_error 52.1 ms model_error: Step 'a' failed. The model's message: a: no words [2J [rid]"
    )


def test_other_text_lines_have_their_message() -> None:
    assert text_of(msg="draining", in_flight=1) == "INFO    x: draining"


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
    assert type(formatter_of(style, None)) is formatter
