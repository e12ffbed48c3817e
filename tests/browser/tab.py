"""One tab of a browser, for tests that run in each of them."""

import json
from typing import Any, Protocol

from selenium.webdriver import Chrome

_CALL = """
const done = arguments[arguments.length - 1];
Promise.resolve((%s)(...Array.from(arguments).slice(0, -1))).then(
  (result) => done(JSON.stringify(result ?? null)), (error) => done(JSON.stringify({ failure: String(error) })));
"""


class Tab(Protocol):
    """Implemented by :class:`tests.browser.firefox.Firefox`."""

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
