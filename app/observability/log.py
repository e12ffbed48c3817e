"""Writes the log to standard error: plain text on a terminal, otherwise one JSON object for each line.

``configure_logging`` sets up the log of the process. ``LineWriter`` writes the lines in a separate thread, so that a
slow reader of the log never blocks a request.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from select import PIPE_BUF

import orjson

from app.core.engine import ObservedCall
from app.core.inference import InferenceResponse
from app.core.text import shown

MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Limit of waiting lines, in bytes. Further lines are dropped and counted."""
PAUSE_S = 0.02
"""The pause between two writes, so that a busy gateway writes many lines at once."""
CLOSE_S = 1.0
"""Time limit for writing the last lines at the end of the process."""


class LineWriter(logging.Handler):
    """Writes lines to a descriptor in a separate thread. :meth:`write` may be called from any thread and never blocks.

    A handler of ``logging``, too, which flushes it at the end of the process.
    """

    def __init__(self, descriptor: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._buffer_lock = threading.Lock()
        self._changed = threading.Condition(self._buffer_lock)
        self._waiting = bytearray()
        self._writing_bytes = 0
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """``line`` ends with a newline."""
        with self._buffer_lock:
            waiting_bytes = len(self._waiting)
            if waiting_bytes + self._writing_bytes + len(line) > self._max_waiting_bytes:
                self.dropped += 1
                return
            self._waiting += line
            if waiting_bytes and self._thread is not None:
                return  # the thread was woken for the first of these lines
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="log", daemon=True)
                with suppress(RuntimeError):  # no thread can start: the next line tries again
                    thread.start()
                    self._thread = thread

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)

    def flush(self, within_s: float = CLOSE_S) -> None:
        """Waits until every line is written, or until the timeout."""
        with self._buffer_lock:
            self._changed.wait_for(lambda: not self._waiting and not self._writing_bytes, within_s)

    def _run(self) -> None:
        while True:
            with self._buffer_lock:
                self._changed.wait_for(lambda: self._waiting)
                lines, self._waiting = self._waiting, bytearray()
                self._writing_bytes = len(lines)
            self._write_all(lines)
            with self._buffer_lock:
                self._writing_bytes = 0
                self._changed.notify_all()
            time.sleep(PAUSE_S)

    def _write_all(self, lines: bytearray) -> None:
        """Blocks as long as the reader of the descriptor does. Lines that cannot be written are dropped.

        Other processes may write to the same pipe: only writes of at most ``PIPE_BUF`` bytes are never mixed.
        """
        begin, view = 0, memoryview(lines)
        try:
            while begin < len(lines):
                end = lines.rfind(b"\n", begin, begin + PIPE_BUF) + 1 or lines.find(b"\n", begin) + 1
                begin += os.write(self._descriptor, view[begin:end])
        except Exception:  # of any kind, because the thread writes all later lines too
            with self._buffer_lock:
                self.dropped += lines.count(b"\n", begin)


_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every log record has. All others were given as ``extra``."""

_QUIET = ("uvicorn", "httpx", "websockets")


class JsonFormatter(logging.Formatter):
    """One JSON object: ``time``, ``level``, ``logger``, ``message``, the fields given as ``extra``, ``exc_info``.

    ``own``: fields of every line of this process.
    """

    def __init__(self, own: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._own = own or {}

    def line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> bytes:
        """``created``: seconds since the epoch."""
        at = datetime.fromtimestamp(created, UTC)
        line = {"time": at, "level": level, "logger": logger, "message": message, **self._own, **fields}
        try:
            text = orjson.dumps(line, default=repr, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # text with invalid Unicode, integers beyond 64 bits, or keys that are not strings
            line["time"] = at.isoformat()
            text = json.dumps(line, default=repr, skipkeys=True, separators=(",", ":")).encode() + b"\n"
        if not text.isascii():
            for separator in ("\x85", "\u2028", "\u2029"):  # some readers interpret these as line breaks
                text = text.replace(separator.encode(), f"\\u{ord(separator):04x}".encode())
        return text

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _KNOWN}
        if record.exc_info:
            fields["exc_info"] = self.formatException(record.exc_info)
        line = self.line(record.created, record.levelname, record.name, record.getMessage(), fields)
        return line.decode().rstrip("\n")


class TextFormatter(logging.Formatter):
    """Plain text. The line of a request has its main fields, and the code and the cause if it failed."""

    def __init__(self, own: Mapping[str, object] | None = None) -> None:
        """``own``: names and values that each line of this process begins with."""
        source = "".join(f"{name} {value} " for name, value in (own or {}).items())
        super().__init__(f"%(asctime)s %(levelname)-7s {source}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """A request: ``POST /v1/pipelines/ocr 200 ocr ok 52.1 ms``, and its code, detail and the model's message."""
        fields = vars(record)
        if "duration_ms" in fields and "method" in fields:
            words = [fields["method"], fields["path"], fields["status"], fields.get("pipeline"), fields["outcome"]]
            text = " ".join(str(word) for word in words if word is not None) + f" {fields['duration_ms']} ms"
            if "code" in fields:
                message = fields.get("triton_message")
                public = fields["detail"].partition(" The model's message: ")[0]
                detail = f"{public} The model's message: {message}" if message else fields["detail"]
                text += f" {fields['code']}: {detail} [{fields['request_id']}]"
            record.message = shown(text, len(text), substitute=" ")
        return super().formatMessage(record)


class StructuredLogger:
    """Logs messages with named fields, as ``Logger.log(level, message, extra=fields)`` does.

    Creating a ``LogRecord`` takes 10 us, so none is created while the only handler writes JSON lines.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self.is_enabled_for = self._logger.isEnabledFor

    def log(self, level: int, message: str, fields: Mapping[str, object]) -> None:
        """Call it only if :meth:`is_enabled_for` is true."""
        logger, handlers = self._logger, logging.root.handlers
        handler = handlers[0] if len(handlers) == 1 else None
        is_filtered = logger.parent is not logging.root or logger.handlers or logger.filters
        if isinstance(handler, LineWriter) and not (is_filtered or handler.filters):
            formatter = handler.formatter
            if isinstance(formatter, JsonFormatter):
                level_name = logging.getLevelName(level)
                handler.write(formatter.line(time.time(), level_name, logger.name, message, fields))
                return
        logger.log(level, message, extra=fields)


def dropped_lines() -> int:
    """The number of lines that the log dropped since the start of the process."""
    return sum(handler.dropped for handler in logging.root.handlers if isinstance(handler, LineWriter))


def configure_logging(level: str, style: str, own: Mapping[str, object] | None = None) -> LineWriter:
    """``style``: ``json``, ``text``, or ``auto``: text if standard error is a terminal.

    ``own``: fields of every line of this process. The writer counts the lines that were dropped.
    """
    writer = LineWriter(sys.stderr.fileno())
    is_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    writer.setFormatter(TextFormatter(own) if is_text else JsonFormatter(own))
    logging.root.setLevel(level.upper())
    logging.root.handlers[:] = [writer]
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    return writer


def say(line: str) -> None:
    """Writes a message for the user: as plain text, or as a line of the log if these are JSON."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers):
        logging.getLogger(__name__).info(line)
        return
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


_log = StructuredLogger("triton_gateway.tensors")


@dataclass(eq=False)
class LoggedCall(ObservedCall):
    """Implements ``GATEWAY_LOG_TENSORS=shapes``: observes a call, and logs one line for each response.

    A line has the name, datatype and shape of each output with the request id, but no values.
    """

    number: int = 0
    """The number of the last response."""

    def response(self, response: InferenceResponse) -> None:
        self.number += 1
        if not _log.is_enabled_for(logging.INFO):
            return
        fields = {
            "triton_request_id": self.request.request_id,
            "model": self.request.model,
            "response": self.number,
            "tensors": " ".join(f"{each.name}:{each.datatype}{list(each.shape)}" for each in response.outputs.values()),
            "final": response.is_final,
        }
        _log.log(logging.INFO, "tensors", fields)
