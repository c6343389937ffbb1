"""What can be done with answers on the chat page: go on, change, compare; presets, and the page's languages."""

from __future__ import annotations

import json

import pytest
from selenium.webdriver.common.keys import Keys

from tests.server.web.nightly.browser import PHONE, WIDE, needs_axe, needs_chromium
from tests.server.web.nightly.test_chat import ANSWERED, prompts

pytestmark = needs_chromium


async def test_a_stopped_answer_goes_on_where_it_was(serve, page_of):
    said = iter(["Once upon", " a time."])
    server = await serve(script=lambda request: [*server.tokenizer.encode(next(said)), 2], paused=True)
    page = page_of(server)
    await page.open()
    await page.say("A story")
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(4)
    await page.until("document.querySelector('.assistant .markdown').textContent === 'Once'")
    await page.press(Keys.ESCAPE)
    await page.until("document.querySelector('.stats')?.textContent.includes('Stopped.')")
    await server.engine.until(lambda: not server.engine.live)
    await page.click_text("Continue")
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(30)
    await page.until(ANSWERED)
    assert await page.texts(".assistant .markdown") == ["Once a time."]
    assert prompts(server)[1].rstrip().endswith("Once")
    assert "Stopped." not in (await page.texts(".stats"))[0]
    await page.reload()
    assert await page.texts(".assistant .markdown") == ["Once a time."]


async def test_an_answer_is_changed_beside_the_first_and_goes_on(serve, page_of):
    server = await serve(script=lambda request: server.tokenizer.encode(f"Answer {len(server.engine.submitted)}."))
    page = page_of(server)
    await page.open()
    await page.click("#settings-toggle")
    await page.type("#set-max_tokens", "9")
    await page.say("Hi")
    await page.until(ANSWERED)
    await page.click_text("Edit", within=".assistant")
    await page.type(".edit textarea", "**My** own", clear=True)
    await page.press(Keys.CONTROL + Keys.ENTER)
    await page.until("document.querySelector('.assistant .branch')?.textContent.includes('2/2')")
    assert await page.texts(".assistant .markdown") == ["My own"]
    assert len(server.engine.submitted) == 1, "nobody is asked"
    await page.click_text("Continue")
    await page.until("document.querySelector('.assistant .markdown').textContent === 'My ownAnswer 1.'")
    await page.until(ANSWERED)
    await page.say("More")
    await page.until("document.querySelectorAll('.assistant').length === 2")
    await page.until(ANSWERED)
    assert "**My** ownAnswer 1." in prompts(server)[2]
    continued = "return [...document.querySelectorAll('button')].filter(each => each.textContent === 'Continue').length"
    assert await page.run(continued) == 1, "only the last answer goes on"
    await page.click(".assistant [aria-label='Version before']")
    await page.until("document.querySelector('.assistant .markdown').textContent === 'Answer 0.'")


async def test_the_rest_of_an_answer_has_no_form_and_says_so(serve, page_of):
    server = await serve("yes")
    page = page_of(server)
    await page.open()
    await page.click("#settings-toggle")
    await page.run(
        "const kinds = document.getElementById('set-form'); kinds.value = 'choice';"
        "kinds.dispatchEvent(new Event('input'))"
    )
    await page.say("Well?")
    await page.until(ANSWERED)
    await page.click_text("Continue")
    await page.until("document.querySelector('.stats')?.textContent.includes('The rest has no form.')")
    await page.until(ANSWERED)
    assert [bool(request.params.matchers) for request in server.engine.submitted] == [True, False]


async def test_a_preset_keeps_settings_under_a_name(serve, page_of):
    server = await serve("Fine")
    page = page_of(server)
    await page.open()
    await page.click("#settings-toggle")
    await page.type("#set-system", "Be brief.")
    await page.type("#set-temperature", "0.3")
    await page.type("#preset-name", "Short")
    await page.click_text("Save")
    await page.click_text("Back to defaults")
    assert await page.run("return document.getElementById('set-system').value") == ""
    choose = "const p = document.getElementById('preset'); p.value = arguments[0]; p.dispatchEvent(new Event('input'))"
    await page.reload()
    await page.click("#settings-toggle")
    await page.run(choose, "Short")
    assert await page.run("return document.getElementById('set-system').value") == "Be brief."
    await page.say("Hi")
    await page.until(ANSWERED)
    assert server.engine.submitted[0].params.temperature == 0.3
    assert "Be brief." in prompts(server)[0]
    await page.click(".presets [aria-label='Delete this preset']")
    assert await page.texts("#preset option") == ["–"]
    assert await page.run("return document.getElementById('set-system').value") == "Be brief.", "settings stay"


async def test_two_answers_stand_side_by_side_and_one_goes_on(several, page_of):
    server, _ = await several()
    page = page_of(server)
    preset = json.dumps({"Cool": {"system": "Be cool.", "temperature": "0.1"}})
    await page.open()
    await page.run("localStorage.setItem('oneloop.presets', arguments[0])", preset)
    await page.reload()
    await page.until("document.getElementById('models').options.length === 2")
    await page.until("document.getElementById('compare-model')")
    await page.click("#settings-toggle")
    await page.click("#compare-on")
    pick = (
        "const p = document.getElementById(arguments[0]); p.value = arguments[1]; p.dispatchEvent(new Event('input'))"
    )
    await page.run(pick, "compare-model", "b")
    await page.run(pick, "compare-preset", "Cool")
    await page.say("Who are you?")
    await page.until("document.querySelectorAll('.pair .assistant .stats').length === 2")
    await page.until("document.querySelector('#send').textContent === 'Send'")
    assert await page.texts(".pair .markdown") == ["I am a", "I am b"]
    assert (await page.texts(".pair .stats"))[1].startswith("b: Cool:")
    assert await page.run("return document.querySelector('.preferred .markdown').textContent") == "I am a"
    await page.click_text("Go on with this one")
    await page.until("document.querySelector('.preferred .markdown').textContent === 'I am b'")
    await page.reload()
    assert await page.texts(".pair .markdown") == ["I am a", "I am b"]
    assert await page.run("return document.querySelector('.preferred .markdown').textContent") == "I am b"
    await page.click("#settings-toggle")
    await page.until("document.getElementById('compare-model')")
    await page.click("#compare-on")
    await page.say("Go on")
    await page.until("document.querySelectorAll('.assistant').length === 3")
    await page.until(ANSWERED)
    sent = await page.imported(
        "library.js",
        "const t = await import(new URL('tree.js', document.querySelector('script[type=module]').src));"
        "return t.messages(t.path((await m.all())[0]), '').map(each => each.content)",
    )
    assert sent[:3] == ["Who are you?", "I am b", "Go on"]


SPOKEN = {"de": ("Senden", "Neues Gespräch", "Bearbeiten"), "zh": ("发送", "新对话", "编辑")}


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("language", SPOKEN)
async def test_the_page_speaks_the_language_that_is_chosen(serve, page_of, language, size):
    page = page_of(await serve("Fine"))
    await page.open(size=size)
    assert await page.run("return document.documentElement.lang") == "en"
    await page.click("#settings-toggle")
    choose = (
        "const p = document.getElementById('language'); p.value = arguments[0]; p.dispatchEvent(new Event('input'))"
    )
    await page.run("delete document.documentElement.dataset.ready")
    await page.run(choose, language)
    await page.until("document.documentElement.dataset.ready")
    await page.say("Hi")
    await page.until("document.querySelector('.message:last-child .stats')?.textContent")
    send, new, edit = SPOKEN[language]
    assert await page.run("return document.documentElement.lang") == language
    assert await page.texts("#send") == [send]
    assert await page.run("return document.getElementById('new').textContent") == new
    assert edit in await page.texts(".user .foot button")
    assert await page.run("return document.documentElement.scrollWidth <= innerWidth")
    await page.open("/dashboard", size=size)
    assert await page.run("return document.documentElement.lang") == language
    assert await page.run("return document.documentElement.scrollWidth <= innerWidth")


@needs_axe
async def test_axe_finds_nothing_serious_beside_a_pair(serve, page_of):
    page = page_of(await serve("Fine, with ```code```.\n\n```python\nreturn 'a' # 1\n```"))
    await page.open()
    await page.click("#settings-toggle")
    await page.click("#compare-on")
    await page.say("Hi")
    await page.until("document.querySelectorAll('.pair .stats').length === 2")
    await page.until("document.querySelector('#send').textContent === 'Send'")
    assert await page.serious() == []
