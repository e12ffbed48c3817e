"""The console, operated like a user does."""

from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

WAIT_S = 60.0
PASTED = 30
"""The characters of a text that nobody types: each is three events in the browser."""
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
