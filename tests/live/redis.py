"""A real ``redis-server`` for a test, on a free port, which may be stopped, frozen, killed and started again."""

import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

START_S = 10.0
PASSWORD = "a-secret-of-redis"


def has_redis() -> bool:
    return shutil.which("redis-server") is not None


@dataclass
class RedisServer:
    """Keeps its data over a restart, in ``folder``."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--appendonly", "yes", "--save", ""]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", *words, "--requirepass", PASSWORD, "--dir", str(self.folder)], stdout=log, stderr=log
            )
        ends = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < ends, (self.folder / "redis.log").read_text()
            time.sleep(0.02)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends the process with this signal. It keeps its data."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(START_S)
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Removes all data, like a failover to an empty replica."""
        self._say("FLUSHALL")

    def clients(self) -> int:
        """Open connections, this one aside."""
        answer = self._say("INFO clients").partition(b"connected_clients:")[2]
        return int(answer.partition(b"\r")[0]) - 1

    def _say(self, *commands: str) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall("".join(f"{command}\r\n" for command in (f"AUTH {PASSWORD}", *commands)).encode())
            return connection.recv(4096)

    def _answers(self) -> bool:
        try:
            return self._say("PING").startswith(b"+OK")
        except OSError:
            return False
