"""One tab of a browser, for tests that run in each of them: Chromium, and a headless Firefox.

Firefox is controlled by WebDriver BiDi without a driver. Source: the W3C's WebDriver BiDi.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from selenium.webdriver import Chrome
from selenium.webdriver.remote.websocket_connection import WebSocketConnection

from tests.toolkit.programs import running_program

_CALL = """
const done = arguments[arguments.length - 1];
Promise.resolve((%s)(...Array.from(arguments).slice(0, -1))).then(
  (result) => done(JSON.stringify(result ?? null)), (error) => done(JSON.stringify({ failure: String(error) })));
"""


class Tab(Protocol):
    name: str

    def open(self, url: str) -> None: ...

    def reload(self) -> None: ...

    def call(self, function: str, *arguments: str) -> Any:
        """Calls a function of JavaScript with texts; returns its result or that of its promise, which must be JSON."""


class ChromiumTab:
    name = "chromium"

    def __init__(self, browser: Chrome) -> None:
        self._browser = browser

    def open(self, url: str) -> None:
        self._browser.get(url)

    def reload(self) -> None:
        self._browser.refresh()

    def call(self, function: str, *arguments: str) -> Any:
        return json.loads(self._browser.execute_async_script(_CALL % function, *arguments))


COMMAND_S = 60.0
POLL_S = 0.005
ADDRESS = "WebDriverBiDiServer.json"
"""Firefox writes this file to its profile when it accepts commands."""


class BidiError(Exception):
    """The browser refused a command, or a script of the page failed."""


class Firefox:
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
    address = folder / ADDRESS
    with running_program(command, folder / "firefox.log", address.exists, env=environment):
        port = json.loads(address.read_text())["ws_port"]
        connection = WebSocketConnection(f"ws://127.0.0.1:{port}/session", COMMAND_S, POLL_S)
        yield Firefox(connection)
        connection.close()
