"""Other programs, such as nginx and Redis, as processes."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.toolkit.waiting import PATIENCE_S, eventually

PASSWORD = "a-secret-of-redis"


def output_of(
    command: Sequence[str | Path],
    folder: Path | None = None,
    *,
    text: str = "",
    environment: Mapping[str, str] | None = None,
    within_s: float = 300,
) -> str:
    """Runs a program to its end, with ``text`` as input. Returns what it prints; fails with that and its errors."""
    done = subprocess.run(
        command, cwd=folder, env=environment, input=text, timeout=within_s, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def environment_without_proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


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
        process.send_signal(signal.SIGCONT)  # a test may have stopped it
        process.wait(PATIENCE_S)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def has_redis() -> bool:
    return shutil.which("redis-server") is not None


@dataclass
class RedisServer:
    """A real ``redis-server`` that a test can stop, freeze and start again. Keeps its data in ``folder``."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        # Without fsync, Redis writes each change before it answers. With "everysec", it postpones up to 2 s of changes
        # while the disk is busy, and a kill loses them.
        options += ["--appendonly", "yes", "--appendfsync", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", *options, "--requirepass", PASSWORD, "--dir", str(self.folder)], stdout=log, stderr=log
            )
        eventually(self._is_up)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends the process with this signal. It keeps its data."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(PATIENCE_S)
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def keep_in_memory_only(self) -> None:
        """Writes no file until the next start."""
        self._command("CONFIG SET appendonly no")

    def clients(self) -> int:
        """Returns the number of open connections, without the connection of this query."""
        answer = self._command("INFO clients").partition(b"connected_clients:")[2]
        return int(answer.partition(b"\r")[0]) - 1

    def _command(self, *commands: str) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall("".join(f"{command}\r\n" for command in (f"AUTH {PASSWORD}", *commands)).encode())
            return connection.recv(4096)

    def _is_up(self) -> bool:
        try:
            return self._command("PING").startswith(b"+OK")
        except OSError:
            return False
