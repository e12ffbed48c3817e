"""Imported in the process of each model: what the model prints and logs begins with its name.

Lines of ``print`` are written at once. `TritonLog` reads the names. Standard library only, Python 3.10 or newer.
"""

import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

STUB = "triton_python_backend_stub"
UTILITIES = "triton_python_backend_utils"


class NamedLines(io.RawIOBase):
    """Writes each line with a prefix. A part of a line becomes a line."""

    def __init__(self, descriptor: int, prefix: str) -> None:
        self._file, self._prefix = io.FileIO(descriptor, "w", closefd=False), prefix.encode()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        lines = bytes(data).splitlines()
        self._file.write(b"".join(b"%s%s\n" % (self._prefix, line) for line in lines))
        return len(data)


class Utilities(ModuleType):
    """The module ``triton_python_backend_utils``, into which Triton's stub writes its ``Logger``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "Logger":
            for method in ("log_info", "log_warn", "log_error", "log_verbose"):
                log = getattr(value, method)
                setattr(value, method, staticmethod(lambda text, log=log: log(named(text))))
        super().__setattr__(name, value)


def named(text: str) -> str:
    """With the model's name, except for lines of ``GATEWAY_LOG_TENSORS``, which are the same in every Triton."""
    return text if text.startswith("tensors ") else f"model '{MODEL}' logs: {text}"


COMMAND = Path("/proc/self/cmdline").read_text().split("\0")
if Path(COMMAND[0]).name == STUB:
    MODEL = Path(COMMAND[1]).parents[1].name
    for stream, way in (("stdout", "prints"), ("stderr", "writes to stderr")):
        raw = NamedLines(getattr(sys, stream).fileno(), f"model '{MODEL}' {way}: ")
        text = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True)
        setattr(sys, stream, text)
    sys.modules[UTILITIES].__class__ = Utilities
