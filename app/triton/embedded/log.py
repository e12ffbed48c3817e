"""Forwards Triton's log to Python's logging, and keeps the latest lines to explain a failure."""

import logging
import re
from collections import deque
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_LEVELS = {"I": logging.DEBUG, "W": logging.DEBUG, "E": logging.ERROR, "F": logging.CRITICAL}
_PREFIX = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (\S+)\] ?(.*)", re.DOTALL)
_LOADED = re.compile(r"\"successfully loaded '([^']+)'")
_NOT_LOADED = re.compile(r"\"failed to load '([^']+)' version \d+: (.*)\"\Z", re.DOTALL)
_NOT_POLLED = re.compile(r"\"?Poll failed for model directory '([^']+)': (.*?)\"?\Z", re.DOTALL)
# Logged at every start without a GPU, where they are harmless.
_HARMLESS = re.compile(r"CUDA|CudaDriverHelper|NVML|DCGM")
# Lines that models write for GATEWAY_LOG_TENSORS (model_kit.tensor_log). They are shown although other lines are not.
_TENSORS = re.compile(r'"?tensors triton_request_id=')
# Rows of the tables that Triton logs at its start. All other messages of Triton have one line each.
_TABLE_ROW = re.compile(r"[+|]")
# Written when Triton is asked to stop.
_STOPPING = re.compile(r"Signal \((?:2|15)\) received\.")
# Written by Triton's handler of SIGABRT and SIGSEGV, and by glibc and libstdc++ before an abort. A model's process may
# write the same words. Sources: triton_signal.cc of Triton's server, malloc.c, assert.c and debug/ of glibc.
_DEATH = re.compile(
    r"Signal \((?:6|11)\) received\."
    r"|(?:malloc|calloc|realloc|free|munmap_chunk|mremap_chunk|malloc_consolidate|tcache_thread_shutdown)\(\): "
    r"|double free or corruption|corrupted (?:size|double-linked)"
    r"|\*\*\* .* detected \*\*\*|Fatal glibc error: |.*: Assertion `.*' failed\."
    r"|terminate called |pure virtual method called"
)
_LINES_KEPT = 400
_LONGEST_LINE = 16 * 1024


class TritonLog:
    """Parses the bytes of Triton's log."""

    def __init__(self) -> None:
        self.death = ""
        """The first line that announces that Triton, or the process of a model, is crashing; empty if there is none."""
        self.loaded: list[str] = []
        self.failures: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._rest = b""
        self._level = logging.DEBUG

    def feed(self, data: bytes) -> None:
        """Adds the next bytes, which may end inside a line. A line that is too long is split."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line[:_LONGEST_LINE].decode("utf-8", "replace").rstrip())

    def explanation(self) -> str:
        """Returns why Triton exited, according to its log: the models that failed, otherwise its last errors."""
        if self.failures:
            return "\n".join(f"model {name!r}: {reason}" for name, reason in sorted(self.failures.items()))
        return "\n".join(self._errors()) or "\n".join([*self._lines][-8:]) or "it wrote no log"

    def _take(self, line: str) -> None:
        self._lines.append(line)
        if match := _PREFIX.match(line):
            self._level = logging.INFO if _TENSORS.match(match[3]) else _LEVELS[match[1]]
            self._learn(match[3])
        elif line and not _TABLE_ROW.match(line):
            self._level = self._level_without_prefix(line)
        if line and not _HARMLESS.search(line):
            logger.log(self._level, "triton: %s", line)

    def _level_without_prefix(self, line: str) -> int:
        """Triton did not write the line with its logger: glibc, a crash handler or a model did."""
        if _DEATH.match(line):
            self.death = self.death or line
            return logging.ERROR
        return logging.DEBUG if _STOPPING.match(line) else logging.WARNING

    def _learn(self, message: str) -> None:
        if match := _LOADED.match(message):
            self.loaded.append(match[1])
        elif match := _NOT_LOADED.match(message) or _NOT_POLLED.match(message):
            self.failures[match[1].rpartition("/")[2]] = match[2].replace("\\n", "\n").strip()

    def _errors(self) -> Iterator[str]:
        for line in self._lines:
            if line.startswith(("E", "F", "error:", "Failed")) and not _HARMLESS.search(line):
                yield line
