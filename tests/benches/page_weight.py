"""What the pages weigh, and how long until one can be used: `python -m tests.benches.page_weight [LOADS]`.

Weight is counted from the files as the server sends them. Times are medians of so many loads (5) in Debian's chromium, from the
address to the script's last line, which is when a person can type; a server with a fake engine answers. They are of the machine
that they are taken on: to be compared with others of the same minute, and held by no test."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from typing import NamedTuple

from selenium import webdriver

from server.http import pages
from tests.server.web.nightly import browser

PAGES = {"/": "index.html", "/dashboard": "dashboard.html", "/docs": "docs.html"}
# Notes when a page says that it is ready, before any of its own scripts runs.
_NOTE = """
new MutationObserver((_, observer) => {
  if (document.documentElement?.dataset.ready) { observer.disconnect(); window.readyAt = performance.now(); }
}).observe(document, {subtree: true, childList: true, attributes: true});
"""
_SENT = "return performance.getEntries().reduce((sum, each) => sum + (each.transferSize ?? 0), 0)"


class Weight(NamedTuple):
    num_files: int
    num_bytes: int
    num_sent: int  # with gzip


def names_of(page: str) -> set[str]:
    """The files that the HTML of a page names."""
    return set(re.findall(r'(?:src|href)="web/[0-9a-f]+/([^"]+)"', pages.site().pages[page].body.decode()))


def weight(page: str) -> Weight:
    site = pages.site()
    files = [site.pages[page], *(site.assets[name] for name in names_of(page))]
    return Weight(len(files), sum(len(each.body) for each in files), sum(len(each.compressed) for each in files))


def loaded(driver: webdriver.Chrome, address: str) -> tuple[float, int]:
    """Milliseconds until it was ready, and bytes that were sent for it."""
    driver.get(address)
    found = driver.execute_async_script(browser._UNTIL % "window.readyAt") and driver.execute_script("return readyAt")
    return float(found), int(driver.execute_script(_SENT))


def main(num_loads: int) -> None:
    for path, page in PAGES.items():
        print(
            f"{path:12} {weight(page).num_files} files, {weight(page).num_bytes:,} bytes, {weight(page).num_sent:,} as sent"
        )
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fake_server", "--fake", "tiny"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:  # fmt: skip
        assert server.stdout is not None
        driver, port = browser.start(), int(server.stdout.readline())
        try:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _NOTE})
            loaded(driver, f"http://127.0.0.1:{port}/docs")  # the browser itself has started then
            for path in PAGES:
                for is_kept in (False, True):
                    found = []
                    for _ in range(num_loads):
                        if not is_kept:
                            driver.execute_cdp_cmd("Network.clearBrowserCache", {})
                        found.append(loaded(driver, f"http://127.0.0.1:{port}{path}"))
                    times, sent = zip(*found, strict=True)
                    kept = "with what browsers keep" if is_kept else "with nothing kept"
                    print(
                        f"{path:12} {statistics.median(times):.0f} ms {kept}, {statistics.median(sent):,.0f} bytes over HTTP"
                    )
        finally:
            driver.quit()
            server.terminate()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
