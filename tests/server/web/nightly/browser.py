"""A page in a real browser: Debian's chromium, without a window, by Selenium. Tests that need it skip where there is none.

Selenium blocks, so it runs on a thread and the server under test goes on in the loop. Nothing is polled and nothing waits for time:
`until` is answered by the page, when a change of its document makes the condition true."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium (see .ci/run)")
AXE = Path(os.environ.get("AXE_CORE", ""))  # axe.min.js of the npm package axe-core
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="there is no axe-core (AXE_CORE, see .ci/run)")

WIDE, PHONE = (1280, 860), (390, 780)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--hide-scrollbars", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip

# Resolves once `condition` holds, which is looked at after each change of the document.
_UNTIL = """
const done = arguments[arguments.length - 1], holds = () => { try { return %s; } catch { return false; } };
const observer = new MutationObserver(() => { if (holds()) { observer.disconnect(); done(true); } });
observer.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
if (holds()) { observer.disconnect(); done(true); }
"""


def start() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None, "tests that come here are marked"
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(float(os.environ.get("PYTEST_TIMEOUT", 300)) / 2)  # a hang ends before the test does
    return driver


# Where the focus is, [path, whether it can be seen there]; null where it is nowhere.
_FOCUSED = """
const at = document.activeElement;
if (!at || at === document.body) return null;
const steps = [];
for (let each = at; each.parentElement; each = each.parentElement) steps.unshift([...each.parentElement.children].indexOf(each));
const style = getComputedStyle(at);
return [`${at.tagName} ${steps.join(".")}`, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0];
"""


class Focused(NamedTuple):
    path: str
    is_marked: bool  # by an outline
    name: str  # as a screen reader says it


class Page:
    """What a person does at a page, and sees."""

    def __init__(self, driver: webdriver.Chrome, base: str) -> None:
        self._driver = driver
        self.base = base

    async def _do(self, act: Callable[[], T]) -> T:
        return await asyncio.to_thread(act)

    async def open(self, path: str = "/", *, size: tuple[int, int] = WIDE, dark: bool = False) -> None:
        """Until its script is ready."""
        await self.resize(*size)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        await self._do(lambda: self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme))
        await self._do(lambda: self._driver.get(self.base + path))
        await self.until("document.documentElement.dataset.ready")

    async def reload(self) -> None:
        await self._do(self._driver.refresh)
        await self.until("document.documentElement.dataset.ready")

    async def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self._do(lambda: self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics))

    async def until(self, condition: str) -> None:
        await self._do(lambda: self._driver.execute_async_script(_UNTIL % condition))

    async def run(self, body: str, *arguments: Any) -> Any:
        """What the body of a function returns."""
        return await self._do(lambda: self._driver.execute_script(body, *arguments))

    async def imported(self, module: str, body: str, *arguments: Any) -> Any:
        """What `body` returns, in which the exports of a module of the pages are `m`."""
        at = await self.run("return document.querySelector('script[type=module]').src")
        script = (
            f"const [at, ...args] = arguments, done = args.pop(); import(new URL({json.dumps(module)}, at))"
            f".then(async m => {{ {body} }}).then(done, error => done({{error: String(error.stack)}}))"
        )
        found = await self._do(lambda: self._driver.execute_async_script(script, at, *arguments))
        assert not (isinstance(found, dict) and "error" in found), found["error"]
        return found

    async def texts(self, selector: str) -> list[str]:
        found: list[str] = await self.run(
            "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)", selector
        )
        return found

    async def _find(self, selector: str) -> WebElement:
        return await self._do(lambda: self._driver.find_element(By.CSS_SELECTOR, selector))

    async def click(self, selector: str) -> None:
        element = await self._find(selector)
        await self._do(element.click)

    async def click_text(self, text: str, *, within: str = "body") -> None:
        """The last button below `within` that says so, of those that can be seen."""
        clicked = await self.run(
            "const found = [...document.querySelectorAll(`${arguments[1]} button`)].filter(each => each.checkVisibility()"
            " && each.textContent === arguments[0]).at(-1); found?.click(); return Boolean(found)",
            text,
            within,
        )
        assert clicked, f"there is no button {text}"

    async def type(self, selector: str, text: str, *, clear: bool = False) -> None:
        element = await self._find(selector)
        if clear:
            await self._do(lambda: element.send_keys(Keys.CONTROL, "a"))
        await self._do(lambda: element.send_keys(text))

    async def press(self, key: str) -> None:
        element = await self._do(lambda: self._driver.switch_to.active_element)
        await self._do(lambda: element.send_keys(key))

    async def back(self) -> None:
        """Shift and Tab."""
        await self._do(
            lambda: ActionChains(self._driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
        )

    async def tabbed(self) -> list[Focused]:
        """What the Tab key comes to, from the top of the page to its end."""
        await self.run("document.body.tabIndex = -1; document.body.focus()")
        found: list[Focused] = []
        while len(found) < 200:
            await self._do(lambda: ActionChains(self._driver).send_keys(Keys.TAB).perform())
            if (seen := await self.run(_FOCUSED)) is None or seen[0] in [each.path for each in found]:
                break
            found.append(Focused(*seen, await self._do(lambda: self._driver.switch_to.active_element.accessible_name)))
        await self.run("document.body.removeAttribute('tabindex')")
        return found

    async def say(self, text: str) -> None:
        """Into the chat, with the Enter key."""
        await self.type("#text", text + Keys.ENTER)

    async def complaints(self) -> list[str]:
        """What the browser's console has of errors: scripts that failed, what the security policy forbade."""
        entries = await self._do(lambda: self._driver.get_log("browser"))
        return [each["message"] for each in entries if each["level"] == "SEVERE"]

    async def serious(self) -> list[str]:
        """What axe-core finds that is serious or worse, as "rule: element"."""
        await self._do(lambda: self._driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()}))
        found = await self._do(
            lambda: self._driver.execute_async_script(
                "const done = arguments[arguments.length - 1]; axe.run(document).then(found => done(found.violations"
                ".filter(each => ['serious', 'critical'].includes(each.impact))"
                ".flatMap(each => each.nodes.map(node => `${each.id}: ${node.html.slice(0, 200)} ${node.failureSummary}`))))"
            )
        )
        return list(found)

    async def screenshot(self, path: Path) -> None:
        await self._do(lambda: self._driver.save_screenshot(str(path)))
