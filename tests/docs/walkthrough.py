"""Follows a tutorial like a reader: writes its files, runs its commands and compares their output."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.live.test_documented_commands import is_the_same
from tests.toolkit.processes import free_ports
from tests.toolkit.programs import environment_without_proxies
from tests.toolkit.waiting import eventually

SERVE = "triton-gateway serve"
URLS = ("127.0.0.1:8080", "127.0.0.1:8081")
"""The addresses of the API and of the admin port on the page."""
START_S = 120.0
ANSWER_S = 60.0
"""Longest wait for an expected output; a changed gateway.yaml applies after about a second."""
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_CREATE = re.compile(r"Create the file `([^`]+)`:$|create the file `([^`]+)`:$")
_APPEND = re.compile(r"at the end of `([^`]+)`[^`]*(?:`[^`]*`[^`]*)*:$")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``before`` is the paragraph above it; it is empty if the block directly follows another block."""

    before: str
    language: str
    text: str

    @property
    def creates(self) -> str:
        """The path of the file that the reader creates with this block."""
        found = _CREATE.search(self.before)
        return (found[1] or found[2]) if found else ""

    @property
    def extends(self) -> str:
        """The path of the file to which the reader appends this block."""
        found = _APPEND.search(self.before)
        return found[1] if found else ""


def blocks_after(page: Path, heading: str) -> list[Block]:
    """Returns the fenced blocks after a heading."""
    text = page.read_text().split(f"\n## {heading}\n", maxsplit=1)[1]
    found, end = [], 0
    for match in _BLOCK.finditer(text):
        between = text[end : match.start()].strip()
        found.append(Block(between.rsplit("\n\n", maxsplit=1)[-1], match[1], match[2]))
        end = match.end()
    return found


@dataclass
class Reader:
    """Follows a page in ``folder``.

    ``own`` maps addresses on the page to addresses in this test. The last of the started ``servers`` is running.
    """

    folder: Path
    own: dict[str, str] = field(default_factory=dict)
    servers: list["Server"] = field(default_factory=list)

    def follow(self, blocks: list[Block]) -> list[int]:
        """Stops the last server with Ctrl-C at the end. Returns the exit status of every server."""
        waiting = list(blocks)
        try:
            while waiting:
                block = waiting.pop(0)
                printed = ""
                if waiting and waiting[0].language == "text" and not waiting[0].before and block.language == "sh":
                    printed = waiting.pop(0).text
                self._do(block, printed)
        finally:
            if self.servers:
                self.servers[-1].press_ctrl_c()
            statuses = [server.process.wait(START_S) for server in self.servers]
        return statuses

    def _do(self, block: Block, printed: str) -> None:
        if path := block.creates or block.extends:
            self._write(self.folder / path, block)
        elif block.language == "sh" and block.text.startswith(SERVE):
            self._serve(block.text, printed)
        elif block.language == "sh":
            self._run(block.text, printed)
        else:
            eventually(lambda: any(is_the_same(block.text, line) for line in self.servers[-1].log.splitlines()))

    def _write(self, path: Path, block: Block) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        already = path.read_text() if block.extends else ""
        path.write_text(already + self._here(block.text))

    def _serve(self, command: str, printed: str) -> None:
        if self.servers:
            self.servers[-1].press_ctrl_c()
        ports = free_ports(2)
        self.own |= {address: f"127.0.0.1:{port}" for address, port in zip(URLS, ports, strict=True)}
        log_path = self.folder.with_name(f"log-{len(self.servers)}")
        self.servers.append(Server.started(self._here(command), ports, self.folder, log_path, environment()))
        self.servers[-1].wait_until_ready()
        assert is_the_same(self._here(printed), self.servers[-1].log), self.servers[-1].log

    def _run(self, command: str, printed: str) -> None:
        ends = time.monotonic() + ANSWER_S
        shell = ["bash", "-uo", "pipefail", "-c", self._here(command)]
        while True:
            done = subprocess.run(
                shell, cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
            )
            if is_the_same(self._here(printed), done.stdout) if printed else done.returncode == 0:
                return
            assert time.monotonic() < ends, f"{command}\nprinted {done.stdout}{done.stderr}\nnot {printed}"
            time.sleep(0.2)

    def _here(self, text: str) -> str:
        for printed, own in self.own.items():
            text = text.replace(printed, own)
        return text


@dataclass
class Server:
    """A running ``triton-gateway serve`` whose output is in ``log_path``."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @classmethod
    def started(
        cls, command: str, ports: list[int], folder: Path, log_path: Path, variables: dict[str, str]
    ) -> "Server":
        """``ports`` are the API's port and the admin port."""
        api, admin = map(str, ports)
        settings = {"GATEWAY_PORT": api, "GATEWAY_ADMIN_PORT": admin, "GATEWAY_LOG_FORMAT": "text"}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=folder,
                env=variables | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, log_path)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_until_ready(self) -> None:
        eventually(lambda: "Try: " in self.log or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.log

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)


def environment() -> dict[str, str]:
    """Returns the variables of a terminal with the activated environment, without settings and proxies."""
    own = {name: value for name, value in environment_without_proxies().items() if not name.startswith("GATEWAY_")}
    return own | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
