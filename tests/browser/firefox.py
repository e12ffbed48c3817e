"""A headless Firefox, controlled by WebDriver BiDi without a driver. Source: the W3C's WebDriver BiDi."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver.remote.websocket_connection import WebSocketConnection

START_S = 30.0
COMMAND_S = 60.0
POLL_S = 0.005
ADDRESS = "WebDriverBiDiServer.json"
"""Firefox writes this file to its profile when it accepts commands."""


class BidiError(Exception):
    """The browser refused a command, or a script of the page failed."""


class Firefox:
    """Implements :class:`tests.browser.tab.Tab`."""

    name = "firefox"

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection
        self.command("session.new", capabilities={"alwaysMatch": {"acceptInsecureCerts": True}})
        self._context = self.command("browsingContext.getTree")["contexts"][0]["context"]

    def open(self, url: str) -> None:
        self.command("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def reload(self) -> None:
        self.command("browsingContext.reload", context=self._context, wait="complete")

    def call(self, function: str, *arguments: str) -> Any:
        answer = self.command(
            "script.callFunction",
            functionDeclaration=f"async (...words) => JSON.stringify(await ({function})(...words) ?? null)",
            arguments=[{"type": "string", "value": each} for each in arguments],
            awaitPromise=True,
            target={"context": self._context},
        )
        if answer["type"] == "exception":
            raise BidiError(answer["exceptionDetails"]["text"])
        return json.loads(answer["result"]["value"])

    def command(self, method: str, **parameters: Any) -> Any:
        answer = self._connection.send_cmd(method, parameters)
        if "error" in answer:
            raise BidiError(f"{method}: {answer['error']}: {answer['message']}")
        return answer["result"]


@contextmanager
def running_firefox(binary: str, folder: Path) -> Iterator[Firefox]:
    """``folder``: an empty one, for the profile."""
    command = [binary, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port=0"]
    environment = os.environ | {
        "HOME": str(folder),
        "MOZ_DISABLE_CONTENT_SANDBOX": "1",
        "MOZ_CRASHREPORTER_DISABLE": "1",
    }
    with (folder / "firefox.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        connection = WebSocketConnection(f"ws://127.0.0.1:{_port(folder, process)}/session", COMMAND_S, POLL_S)
        yield Firefox(connection)
        connection.close()
    finally:
        process.terminate()
        process.wait(30)


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + START_S
    while not (profile / ADDRESS).exists():
        assert process.poll() is None, (profile / "firefox.log").read_text()
        assert time.monotonic() < deadline, "Firefox did not start in time"
        time.sleep(0.05)
    return int(json.loads((profile / ADDRESS).read_text())["ws_port"])
