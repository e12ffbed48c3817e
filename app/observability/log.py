"""The log: one JSON object a line on standard error, or plain lines for a person at a terminal."""

import logging
import sys
from datetime import UTC, datetime

import orjson

from app.observability.lines import LineWriter

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every log record has. All others were given as ``extra``."""

_QUIET = ("uvicorn", "httpx")


class JsonFormatter(logging.Formatter):
    """One JSON object: ``time``, ``level``, ``logger``, ``message``, whatever was given as ``extra``, ``exc_info``."""

    def json_of(self, record: logging.LogRecord) -> bytes:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _KNOWN}
        if record.exc_info:
            line["exc_info"] = self.formatException(record.exc_info)
        text = orjson.dumps(line, default=repr, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
        return text if text.isascii() else _on_one_line(text)

    def format(self, record: logging.LogRecord) -> str:
        return self.json_of(record).decode().rstrip("\n")


def _on_one_line(text: bytes) -> bytes:
    """Escapes the characters beyond ASCII that some readers take for the end of a line."""
    for separator in ("\x85", "\u2028", "\u2029"):
        text = text.replace(separator.encode(), f"\\u{ord(separator):04x}".encode())
    return text


class LineHandler(logging.Handler):
    """Hands formatted records to a :class:`LineWriter`."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            formatter = self.formatter
            if isinstance(formatter, JsonFormatter):
                line = formatter.json_of(record)
            else:
                line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
            self.writer.write(line)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self.writer.flush()


def dropped_lines() -> int:
    """How many lines the log dropped since the process started."""
    handlers = logging.getLogger().handlers
    return sum(handler.writer.dropped for handler in handlers if isinstance(handler, LineHandler))


def configure_logging(level: str, style: str) -> LineWriter:
    """``style``: ``json`` or ``text``. The writer counts the lines that were dropped."""
    writer = LineWriter(sys.stderr.fileno())
    handler = LineHandler(writer)
    handler.setFormatter(
        JsonFormatter() if style == "json" else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    return writer
