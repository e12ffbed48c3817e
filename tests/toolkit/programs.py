"""Other programs, such as nginx and Redis, as processes."""

import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.toolkit.waiting import PATIENCE_S, eventually


@contextmanager
def running_program(
    command: Sequence[str], log: Path, is_up: Callable[[], bool], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the program for the duration of the block, which begins when ``is_up``. ``options``: of Popen."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **options)
    try:
        eventually(lambda: is_up() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
