"""One browser for all tests of a process; each server has a port, and with it an origin, of its own: nothing is shared."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from selenium import webdriver

from tests.server.conftest import Running
from tests.server.web import browser
from tests.server.web.browser import Page


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    driver = browser.start()
    yield driver
    driver.quit()


@pytest.fixture
async def page_of(chromium: webdriver.Chrome) -> AsyncIterator[Callable[[Running], Page]]:
    """`page_of(server)`: a page at that server; whatever it did, the browser's console has no errors."""
    pages: list[Page] = []

    def page(server: Running) -> Page:
        pages.append(Page(chromium, f"http://127.0.0.1:{server.port}"))
        return pages[-1]

    yield page
    for each in pages:
        expected = ("401", "400", "403", "503")  # Chromium notes each answer that is an error
        complaints = await each.complaints()
        assert [text for text in complaints if not any(f"status of {status}" in text for status in expected)] == []
        await each.run("window.onbeforeunload = null")
    if pages:
        await pages[-1]._do(lambda: chromium.get("about:blank"))
