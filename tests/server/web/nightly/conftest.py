"""One browser for all tests of a process; each server has a port, and with it an origin, of its own: nothing is shared."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from selenium import webdriver

from tests.server.conftest import Running
from tests.server.web.nightly import browser
from tests.server.web.nightly.browser import Page


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
        # Chromium notes each answer that is an error, and what a page still asks for when its server has ended.
        expected = ("status of 401", "status of 400", "status of 403", "status of 503", "ERR_CONNECTION_REFUSED")
        complaints = await each.complaints()
        assert [text for text in complaints if not any(words in text for words in expected)] == []
        await each.run("window.onbeforeunload = null")
    if pages:
        await pages[-1]._do(lambda: chromium.get("about:blank"))
