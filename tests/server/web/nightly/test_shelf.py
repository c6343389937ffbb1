"""The list of conversations: titles, pins, folders, and what is shared as a file."""

from __future__ import annotations

from selenium.webdriver.common.keys import Keys

from tests.server.web.nightly.browser import needs_axe, needs_chromium
from tests.server.web.nightly.test_chat import ANSWERED

pytestmark = needs_chromium
# What the page gives the browser to keep, as [name, text]; `downloads()` waits until it is read.
DOWNLOADS = """
window.given = [];
const made = URL.createObjectURL;
URL.createObjectURL = blob => {
  blob.text().then(text => { document.body.dataset.given = given.push([document.lastName, text]); });
  return made(blob);
};
HTMLAnchorElement.prototype.click = function () { document.lastName = this.download; };
"""


async def talk(page, *questions: str) -> None:
    for question in questions:
        await page.click("#new")
        await page.say(question)
        await page.until(ANSWERED)
        await page.until(f"document.querySelector('#conversations').textContent.includes('{question}')")


async def change(page, title: str, *, name: str = "", folder: str = "", pin: bool = False, done: str = "save") -> None:
    # By the script: the list is drawn anew after each answer.
    await page.run("document.querySelector(arguments[0]).click()", f"[aria-label='Change {title}']")
    await page.type("#change-title", name, clear=bool(name))
    await page.type("#change-folder", folder, clear=bool(folder))
    if pin:
        await page.click("#change-pinned")
    await page.click(f"#change-dialog [value={done}]")


async def test_conversations_are_renamed_pinned_and_put_into_folders(serve, page_of):
    page = page_of(await serve("Fine"))
    await page.open()
    await talk(page, "One", "Two", "Three")
    assert await page.texts("#conversations .title") == ["Three", "Two", "One"]
    await change(page, "One", pin=True)
    await page.until("document.querySelector('#conversations .title').textContent.includes('One')")
    await change(page, "Three", name="Third", folder="Work")
    await page.until("document.querySelector('#conversations .folder')")
    assert await page.texts("#conversations summary") == ["Work (1)"]
    assert [text.split()[-1] for text in await page.texts("#conversations .title")] == ["One", "Third", "Two"]
    assert await page.texts("#conversations .current .title") == ["Third"], "it is the one that is shown"
    await page.click("#conversations summary")
    await page.say("More")
    await page.until("document.querySelectorAll('.assistant .stats').length === 2")
    assert not await page.run("return document.querySelector('#conversations details').open"), "it stays closed"
    await page.reload()
    assert await page.texts("#conversations summary") == ["Work (1)"]
    await page.type("#search", "work")
    await page.until("document.querySelectorAll('#conversations .title').length === 1")
    assert await page.run("return document.title") == "Third · oneloop"


async def test_a_conversation_is_shared_as_a_file_and_opened_elsewhere(serve, page_of):
    page = page_of(await serve("Paris"))
    await page.open()
    await page.run(DOWNLOADS)
    await talk(page, "Capital?")
    await change(page, "Capital?", name="Cities", folder="Trips")
    await page.until("document.querySelector('#conversations .folder')")
    await change(page, "Cities", done="markdown")
    await page.until("document.body.dataset.given === '1'")
    await change(page, "Cities", done="file")
    await page.until("document.body.dataset.given === '2'")
    (first, text), (second, data) = await page.run("return given")
    assert (first, second) == ("Cities.md", "Cities.json")
    assert text == "# Cities\n\n## You\n\nCapital?\n\n## tiny\n\nParis\n"
    read = "const [whole] = m.imported(args[0]); return [whole.title, whole.folder, m.path(whole).map(each => each.content)]"
    assert await page.imported("tree.js", read, data) == ["Cities", "Trips", ["Capital?", "Paris"]]


async def test_all_of_it_by_keys_alone(serve, page_of):
    page = page_of(await serve("Fine"))
    await page.open()
    await talk(page, "One")
    await page.press(Keys.CONTROL + "k" + Keys.NULL)
    while await page.run("return document.activeElement.ariaLabel") != "Change One":
        await page.press(Keys.TAB)
    await page.press(Keys.ENTER)
    await page.until("document.getElementById('change-dialog').open")
    await page.press("Renamed" + Keys.ENTER)
    await page.until("document.querySelector('#conversations .title').textContent === 'Renamed'")


@needs_axe
async def test_axe_finds_nothing_serious_in_folders_and_their_dialog(serve, page_of):
    page = page_of(await serve("Fine"))
    await page.open()
    await talk(page, "One", "Two")
    await change(page, "One", folder="Work")
    await page.until("document.querySelector('#conversations .folder')")
    assert await page.serious() == []
    await page.run("document.querySelector(arguments[0]).click()", "[aria-label='Change Two']")
    assert await page.serious() == []
