"""The pictures of the pages that README.md shows: `python -m tests.server.web.nightly.screenshots FOLDER`, a minute and a half.

Debian's chromium looks at a server of the built-in model: at an answer, then at the dashboard, in the dark and on a phone, and at
the inspector, while conversations and questions on shared documents come in, as `bench serve` sends them. Colours are cut to a
palette, which makes files small. A person looks at them before they are kept."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.server.web.nightly import browser
from tests.server.web.nightly.browser import PHONE

SIZE = (1200, 800)
PORT = 8790
BASE = f"http://127.0.0.1:{PORT}"
QUESTION = "Write a Python function that merges two sorted lists."
NUM_COLOURS = 96
LOAD = ("--workload", "agents", "rag", "--concurrency", "6", "--num-requests", "64", "--output-tokens", "16-48")
FILLED_S = 40  # of the minute that the dashboard shows, before it is taken


class Camera:
    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self._driver = driver
        self._folder = folder

    def open(self, path: str, size: tuple[int, int] = SIZE, *, dark: bool = False) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        self._driver.get("about:blank")  # a hash alone would load nothing
        self._driver.get(BASE + path)
        self.until("document.documentElement.dataset.ready")

    def until(self, condition: str) -> None:
        self._driver.execute_async_script(browser._UNTIL % condition)

    def click(self, selector: str) -> None:
        self._driver.execute_script("document.querySelector(arguments[0]).click()", selector)

    def say(self, text: str) -> None:
        self._driver.find_element("css selector", "#text").send_keys(text + Keys.ENTER)

    def run(self, script: str) -> None:
        self._driver.execute_script(script)

    def take(self, name: str) -> None:
        path = self._folder / f"{name}.png"
        self._driver.save_screenshot(str(path))
        with Image.open(path) as picture:
            few = picture.convert("RGB").quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")


def chat(camera: Camera) -> None:
    camera.open("/")
    camera.say(QUESTION)
    camera.until("document.querySelector('.message:last-child .stats')?.textContent.includes('tokens')")
    camera.run("document.querySelector('#scroll').scrollTop = 0")
    camera.take("chat")


def requests(camera: Camera) -> None:
    camera.open("/dashboard#requests")
    camera.until("document.querySelectorAll('#requests-body tr').length > 8")
    camera.run("""
        const rows = [...document.querySelectorAll('#requests-body tr')];
        (rows.find(row => Number(row.cells[3].textContent) > 0 && row.cells[1].textContent !== 'running') ?? rows[0])
          .querySelector('a, button').click();""")
    camera.until("!document.querySelector('#request-detail').hidden")
    camera.take("inspector")


def main(folder: Path) -> None:
    command = [sys.executable, "-m", "server", "serve", "--port", str(PORT)]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        driver = browser.start()
        try:
            while server.poll() is None:  # 503 while it loads is an OSError, too
                with suppress(OSError), urllib.request.urlopen(f"{BASE}/health"):
                    break
                time.sleep(0.1)
            camera = Camera(driver, folder)
            chat(camera)
            load = subprocess.Popen(
                [sys.executable, "-m", "loadtests", "serve", "--url", BASE, *LOAD], stdout=log, stderr=log
            )
            camera.open("/dashboard", (SIZE[0], 900), dark=True)
            time.sleep(FILLED_S)
            camera.take("dashboard")
            requests(camera)
            camera.open("/dashboard", PHONE)
            camera.take("dashboard-phone")
            camera.open("/", PHONE)
            camera.take("chat-phone")
            load.terminate()
            load.wait()
        finally:
            driver.quit()
            server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
