"""The chat page as an app: browsers can install it, and it opens without its server."""

from __future__ import annotations

from tests.server.web.nightly.browser import needs_chromium
from tests.server.web.nightly.test_chat import ANSWERED, proxy

pytestmark = needs_chromium
CONTROLLED = (
    "const done = arguments[arguments.length - 1];"
    "navigator.serviceWorker.ready.then(found => done(found.active?.scriptURL ?? null))"
)


async def worker_of(page) -> str:
    """The address of the service worker, once it is at work."""
    found: str = await page._do(lambda: page._driver.execute_async_script(CONTROLLED))
    return found


async def test_a_browser_can_install_it(serve, page_of):
    page = page_of(await serve("Fine"))
    await page.open()
    assert (await worker_of(page)).endswith("/worker.js")
    manifest = await page._do(lambda: page._driver.execute_cdp_cmd("Page.getAppManifest", {}))
    assert manifest["errors"] == []
    assert manifest["manifest"]["startUrl"] == manifest["manifest"]["scope"] == f"{page.base}/"
    found = await page._do(lambda: page._driver.execute_cdp_cmd("Page.getInstallabilityErrors", {}))
    assert [each["errorId"] for each in found["installabilityErrors"] if each["errorId"] != "in-incognito"] == []


async def test_conversations_can_be_read_without_the_server(serve, page_of):
    server = await serve("Paris")
    page = page_of(server)
    base = page.base
    async with proxy(server.port, "/models/oneloop") as port:
        page.base = f"http://127.0.0.1:{port}/models/oneloop"
        await page.open()
        await page.run("localStorage.setItem('oneloop.language', 'de')")
        await page.reload()
        assert (await worker_of(page)).startswith(page.base)
        await page.say("Capital of France?")
        await page.until("document.querySelector('.message:last-child .stats')?.textContent.includes('Tokens')")
    await page.reload()
    assert await page.texts(".own") == ["Capital of France?"]
    assert await page.texts(".assistant .markdown") == ["Paris"]
    await page.until("document.getElementById('status').textContent.includes('Der Server antwortet nicht')")
    await page.say("And of Spain?")
    await page.until("document.querySelector('.message:last-child .error')")
    page.base = base
    await page.open()


async def test_no_other_script_can_become_a_worker(serve, page_of):
    page = page_of(await serve("Fine"))
    await page.open()
    await worker_of(page)
    tried = (
        "const tried = [() => navigator.serviceWorker.register('docs'), () => new Worker('docs'),"
        " () => trustedTypes.createPolicy('other', {}), () => trustedTypes.createPolicy('oneloop-worker', {})];"
        "return Promise.all(tried.map(async each => { try { await each(); return 'done'; } catch (error) { return error.name; } }))"
    )
    assert set(await page.run(tried)) == {"TypeError"}
    assert len(await page.complaints()) >= 1, "the security policy forbids them"
    await page.say("Hi")
    await page.until(ANSWERED)
