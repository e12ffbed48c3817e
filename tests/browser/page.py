"""What the tests operate: the console like a user does, and one tab for tests that run in Chromium and in Firefox.

Firefox is controlled by WebDriver BiDi without a driver. Source: the W3C's WebDriver BiDi.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.remote.websocket_connection import WebSocketConnection
from selenium.webdriver.support.wait import WebDriverWait

from tests.toolkit.programs import running_program

WAIT_S = 60.0
PASTED = 30
"""The characters of a text that is set at once: each typed character is three events in the browser."""
TEXTS = """
const visible = (element) => element.checkVisibility() ? element.innerText ?? element.textContent : "";
return [...document.querySelectorAll(arguments[0])].map((element) => visible(element).replaceAll("\\t", " ").trim());
"""


class ConsolePage:
    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def open(self, url: str, pipeline: str) -> None:
        self.browser.get(f"{url}/#{pipeline}")
        self.wait_for("main h1", pipeline)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The visible texts, by one command: WebDriver's own needs a command for each element."""
        return [str(text) for text in self.browser.execute_script(TEXTS, selector)]

    def fill(self, field: str, text: str) -> None:
        """Replaces the text of the field, again if the page fills in its sample only now."""
        control = self.one(f"[name={field}]")

        def is_filled(_browser: object) -> bool:
            control.clear()
            self.enter(control, text)
            return control.get_property("value") == text

        WebDriverWait(self.browser, WAIT_S, 0.05).until(is_filled, f"{field} never has the text")

    def enter(self, control: WebElement, text: str) -> None:
        if len(text) < PASTED:
            control.send_keys(text)
        else:
            self.browser.execute_script("arguments[0].focus()", control)
            self.browser.execute_cdp_cmd("Input.insertText", {"text": text})

    def click(self, selector: str) -> None:
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.one(selector))
        self.one(selector).click()

    def wait_for(self, selector: str, text: str = "") -> None:
        """Waits until the page has a matching element that contains the text."""
        shown: str | None = None

        def is_shown(browser: Chrome) -> bool:
            nonlocal shown
            shown = browser.execute_script("return document.querySelector(arguments[0])?.textContent", selector)
            return shown is not None and text in shown

        try:
            WebDriverWait(self.browser, WAIT_S, 0.05).until(is_shown)
        except TimeoutException as exc:
            raise AssertionError(f"{selector} never showed {text!r}; at last it showed {shown!r}") from exc

    def wait_for_state(self, state: str) -> None:
        self.wait_for(f".live[data-state={state}]")

    def wait_for_outputs(self, count: int) -> None:
        def enough(_: Chrome) -> bool:
            return self.figure("tokens").isdecimal() and int(self.figure("tokens")) >= count

        WebDriverWait(self.browser, WAIT_S, 0.05).until(enough, f"never {count} outputs")

    @property
    def written(self) -> str:
        """The text of the stream, with unchanged white space."""
        return str(self.one(".written").get_property("textContent"))

    def figure(self, name: str) -> str:
        return self.one(f"[data-figure={name}]").text


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
