"""A headless Chromium for the session, controlled with WebDriver."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser.page import WAIT_S, ChromiumTab, ConsolePage, Firefox, Tab, running_firefox
from tests.conftest import Require
from tests.toolkit.environments import npm_environment, short_path
from tests.toolkit.processes import GatewayProcess

AXE = """
const [source, rules, done] = arguments;
(0, eval)(source);
const named = ({ id, nodes }) => [id, ...nodes.map(({ html }) => html)];
const options = { preload: false, ...(rules.length ? { runOnly: rules } : {}) };
axe.run(options).then(({ violations }) => done(violations.map(named)));
"""
"""Without preload, because axe would copy imported style sheets into inline styles, which the page's policy blocks."""
RULES_ABOUT_COLOURS = ("color-contrast", "link-in-text-block")
AT_REST = "return document.getAnimations().every((each) => !(each instanceof CSSTransition))"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1100",
]
"""Turns off background requests, and the sandbox, which needs a user namespace that most containers lack."""


@pytest.fixture(scope="session")
def chromium(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with running_chromium(require, tmp_path_factory) as browser:
        yield browser


@contextmanager
def running_chromium(require: Require, folders: pytest.TempPathFactory, *flags: str) -> Iterator[Chrome]:
    """Runs a Chromium for the duration of the block, with further ``flags``."""
    binary, driver = shutil.which("chromium-headless-shell"), shutil.which("chromedriver")
    require(binary and driver, "there is no Chromium with its driver: `make system-packages` installs them")
    options = ChromeOptions()
    options.binary_location = str(with_a_page(str(binary), folders.mktemp("binary")))
    for flag in [*FLAGS, *flags, f"--user-data-dir={folders.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.accept_insecure_certs = True
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with short_path(folders.mktemp("sockets")) as temporary:
        browser = Chrome(options, Service(str(driver), env=os.environ | {"TMPDIR": str(temporary)}))
        browser.set_script_timeout(60)
        yield browser
        browser.quit()


def with_a_page(binary: str, folder: Path) -> Path:
    """A program that starts the browser with a page: its driver waits for one, and the headless shell has none."""
    program = folder / "chromium"
    program.write_text(f'#!/bin/sh\nexec {binary} "$@" about:blank\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="session")
def firefox(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    binary = shutil.which("firefox-esr") or shutil.which("firefox")
    require(binary, "there is no firefox-esr: `make system-packages` installs it")
    with running_firefox(str(binary), tmp_path_factory.mktemp("firefox")) as browser:
        yield browser


@pytest.fixture(scope="module", params=["chromium", "firefox"])
def tab(request: pytest.FixtureRequest) -> Tab:
    """A test with this fixture runs in each browser, in the page that the last test has opened."""
    if request.param == "firefox":
        tab: Tab = request.getfixturevalue("firefox")
        return tab
    return ChromiumTab(request.getfixturevalue("chromium"))


@pytest.fixture
def browser(chromium: Chrome) -> Chrome:
    """A browser with an empty page and an empty log."""
    chromium.get("about:blank")
    chromium.get_log("browser")
    return chromium


@pytest.fixture
def console(browser: Chrome, gateway: GatewayProcess) -> Callable[..., ConsolePage]:
    """``console("write")`` opens a pipeline. ``at`` is another address of the gateway."""

    def opened(pipeline: str, at: str = "") -> ConsolePage:
        page = ConsolePage(browser)
        page.open(at or gateway.url, pipeline)
        return page

    return opened


@pytest.fixture
def axe(chromium: Chrome, require: Require) -> Callable[..., list[list[str]]]:
    """``axe()`` returns the rules that the open page breaks, each with the markup that breaks it; or names of rules."""
    folder = npm_environment("axe", Path(__file__).parent / "npm_axe", require)
    script = (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()

    def axe(*rules: str) -> list[list[str]]:
        WebDriverWait(chromium, WAIT_S, 0.05).until(lambda _: chromium.execute_script(AT_REST), "colours change")
        found: list[list[str]] = chromium.execute_async_script(AXE, script, rules)
        return found

    return axe


@pytest.fixture
def axe_in_both_schemes(
    axe: Callable[..., list[list[str]]], prefer: Callable[[str], None]
) -> Callable[[], list[list[str]]]:
    """The findings of ``axe()`` in the light scheme, and in the dark one those of the rules about colours."""

    def axe_in_both_schemes() -> list[list[str]]:
        prefer("light")
        found = axe()
        prefer("dark")
        return [*found, *axe(*RULES_ABOUT_COLOURS)]

    return axe_in_both_schemes


@pytest.fixture
def prefer(chromium: Chrome) -> Iterator[Callable[[str], None]]:
    """``prefer("dark")``: the colour scheme that pages see as the user's, until the end of the test."""

    def prefer(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    yield prefer
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def screen(chromium: Chrome) -> Iterator[Callable[[int], None]]:
    """``screen(390)``: the width that pages see as that of the screen, until the end of the test."""

    def screen(width: int) -> None:
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    yield screen
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
