"""The chat page in a browser: what a person types, sees, stops, edits, keeps, and finds again."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from selenium.webdriver.common.keys import Keys

from tests.server.test_reasoning_chats import SAYS, thinker
from tests.server.test_tool_calls import TWO
from tests.server.text.tool_samples import TOOLS
from tests.server.web.nightly.browser import PHONE, WIDE, needs_axe, needs_chromium

pytestmark = needs_chromium
ANSWERED = "document.querySelector('.message:last-child .stats')?.textContent.includes('tokens')"


def prompts(server) -> list[str]:
    return [server.tokenizer.decode(request.prompt_ids) for request in server.engine.submitted]


async def test_an_answer_is_streamed_and_says_what_it_took(serve, page_of):
    server = await serve("Hello there", paused=True)
    page = page_of(server)
    await page.open()
    await page.say("Hi")
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(5)
    await page.until("document.querySelector('.assistant .markdown').textContent === 'Hello'")
    assert await page.texts("#send") == ["Stop"]
    server.engine.step(20)
    await page.until(ANSWERED)
    assert await page.texts(".own") == ["Hi"]
    assert await page.texts(".assistant .markdown") == ["Hello there"]
    (stats,) = await page.texts(".stats")
    assert "tokens in, 12 out" in stats
    assert "tokens/s" in stats
    assert "first token after" in stats
    assert await page.texts("#send") == ["Send"]


async def test_stop_ends_it_at_the_server_and_keeps_what_came(serve, page_of):
    server = await serve("Once upon a time", paused=True)
    page = page_of(server)
    await page.open()
    await page.say("A story")
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(4)
    await page.until("document.querySelector('.assistant .markdown').textContent === 'Once'")
    await page.click("#send")
    await server.engine.until(lambda: not server.engine.live)
    await page.until("document.querySelector('.stats')?.textContent.includes('Stopped.')")
    assert await page.texts(".assistant .markdown") == ["Once"]
    await page.say("Go on")
    await server.engine.until(lambda: bool(server.engine.live))
    assert "Once" in prompts(server)[1]
    await page.press(Keys.ESCAPE)
    await server.engine.until(lambda: not server.engine.live)


async def test_edits_and_other_answers_are_branches(serve, page_of):
    server = await serve(script=lambda request: server.tokenizer.encode(f"Answer {len(server.engine.submitted)}."))
    page = page_of(server)
    await page.open()
    await page.type("#settings-toggle", Keys.ENTER)
    await page.type("#set-max_tokens", "9")
    await page.say("First question")
    await page.until(ANSWERED)
    await page.click_text("Regenerate")
    await page.until("document.querySelector('.assistant .branch')?.textContent.includes('2/2')")
    await page.until(ANSWERED)
    await page.click_text("Edit", within=".user")
    await page.type(".edit textarea", "Second question" + Keys.ENTER, clear=True)
    await page.until("document.querySelector('.user .branch')?.textContent.includes('2/2')")
    await page.until(ANSWERED)
    assert await page.texts(".own") == ["Second question"]
    assert "First question" not in prompts(server)[2]
    await page.click(".user [aria-label='Version before']")
    await page.until("document.querySelector('.own').textContent === 'First question'")
    assert await page.texts(".assistant .branch span") == ["2/2"]
    second = await page.texts(".assistant .markdown")
    await page.click(".assistant [aria-label='Version before']")
    await page.until("document.querySelector('.assistant .branch').textContent.includes('1/2')")
    assert await page.texts(".assistant .markdown") != second
    await page.reload()
    assert await page.texts(".own") == ["First question"]
    assert await page.texts(".assistant .branch span") == ["1/2"]


_INSIDE = """
const main = document.querySelector("main").getBoundingClientRect();
return [...document.querySelectorAll(".edit textarea, .edit button")].every(each => {
  const box = each.getBoundingClientRect();
  return box.width > 0 && box.left >= main.left && box.right <= main.right;
});
"""


async def test_a_message_is_edited_beside_the_open_settings(serve, page_of):
    page = page_of(await serve("Hello"))
    await page.open()
    await page.say("Hi")
    await page.until(ANSWERED)
    await page.click("#settings-toggle")
    await page.click_text("Edit", within=".user")
    assert await page.run(_INSIDE)
    await page.press(Keys.ESCAPE)
    await page.until("!document.querySelector('.edit')")
    assert not await page.run("return document.getElementById('settings').hidden"), "Escape ends the edit alone"


async def test_escape_in_the_message_field_closes_the_settings_once_no_answer_is_coming(serve, page_of):
    server = await serve("Hello there", paused=True)
    page = page_of(server)
    await page.open()
    await page.click("#settings-toggle")
    await page.say("Hi")
    await server.engine.until(lambda: bool(server.engine.live))
    await page.press(Keys.ESCAPE)
    await page.until("document.querySelector('.stats')?.textContent.includes('Stopped.')")
    assert not await page.run("return document.getElementById('settings').hidden")
    await page.press(Keys.ESCAPE)
    assert await page.run("return document.getElementById('settings').hidden")
    assert await page.run("return document.activeElement.id") == "text"
    assert not await page.run("return document.getElementById('library').hidden")


async def test_a_number_out_of_range_is_refused_in_the_page_s_own_words(serve, page_of):
    server = await serve("Hello")
    page = page_of(server)
    await page.open()
    await page.click("#settings-toggle")
    await page.type("#set-temperature", "9")
    await page.say("Hi")
    await page.until("document.querySelector('.assistant .error')")
    (said,) = await page.texts(".assistant .error")
    assert said == "Temperature is 9. Enter a number from 0 to 2 in the settings, or leave it empty."
    assert server.engine.submitted == []


async def test_conversations_are_kept_found_exported_and_imported(serve, page_of):
    server = await serve("Paris")
    page = page_of(server)
    await page.open()
    await page.say("Capital of France?")
    await page.until(ANSWERED)
    await page.click("#new")
    assert await page.texts(".own") == []
    await page.say("Something else")
    await page.until(ANSWERED)
    await page.until("document.querySelectorAll('#conversations li').length === 2")
    assert len(prompts(server)) == 2
    assert "France" not in prompts(server)[1]
    await page.type("#search", "FRANCE")
    await page.until("document.querySelectorAll('#conversations li').length === 1")
    assert await page.texts("#conversations .title") == ["Capital of France?"]
    exported = await page.imported("library.js", "return JSON.stringify({oneloop: 1, conversations: await m.all()})")
    await page.click("#conversations [aria-label^=Delete]")
    await page.click("#erase-dialog [value=erase]")
    await page.until("document.querySelectorAll('#conversations li').length === 0")
    await page.type("#search", Keys.BACKSPACE * 6)
    await page.until("document.querySelectorAll('#conversations li').length === 1")
    put = (
        "const files = new DataTransfer(); files.items.add(new File([arguments[0]], 'a.json'));"
        "const input = document.getElementById('import'); input.files = files.files;"
        "input.dispatchEvent(new Event('change'));"
    )
    await page.run(put, exported)
    await page.until("document.querySelectorAll('#conversations li').length === 3")
    damaged = json.dumps({"oneloop": 1, "conversations": [{"nodes": {}, "roots": ["x"]}]})
    for broken, complaint in (("{", "not JSON"), ("{}", "no conversations"), (damaged, "damaged")):
        await page.run(put, broken)
        await page.until(f"document.getElementById('found').textContent.includes('{complaint}')")


async def test_a_reload_in_the_middle_loses_no_question(serve, page_of):
    server = await serve(paused=True)
    page = page_of(server)
    await page.open()
    await page.say("Important")
    await server.engine.until(lambda: bool(server.engine.live))
    await page.until("document.querySelectorAll('#conversations li').length === 1")
    await page.reload()
    await server.engine.until(lambda: not server.engine.live)
    assert await page.texts(".own") == ["Important"]


async def test_reasoning_is_shown_folded_and_not_sent_back(serve, page_of):
    server = await serve(SAYS, speaks=thinker())
    page = page_of(server)
    await page.open()
    await page.say("Hi")
    await page.until(ANSWERED)
    assert await page.texts(".assistant .markdown") == ["Yes."]
    assert await page.run("return document.querySelector('.thoughts').textContent") == "Hm."
    assert await page.run("return document.querySelector('.reasoning').open") is False
    await page.say("More")
    await page.until("document.querySelectorAll('.assistant .stats').length === 2")
    assert "Hm." not in prompts(server)[1]


async def test_tool_calls_are_shown_and_their_results_sent(serve, page_of):
    said = iter([TWO, "Sunny."])
    server = await serve(
        script=lambda request: [*server.tokenizer.encode(next(said)), 2], tool_parser="hermes", max_model_len=8192
    )
    page = page_of(server)
    await page.open()
    await page.type("#settings-toggle", Keys.ENTER)
    await page.run(
        "const area = document.getElementById('set-tools');"
        "area.value = arguments[0]; area.dispatchEvent(new Event('input'))",
        json.dumps(TOOLS),
    )
    await page.say("Weather?")
    await page.until("document.querySelectorAll('.result textarea').length === 2")
    await page.type(".call:nth-child(1) .result textarea", "20 degrees")
    await page.click(".call:nth-child(1) .result button")
    await page.until("document.querySelectorAll('.tool').length === 1")
    await page.type(".call:nth-child(2) .result textarea", "rain")
    await page.click(".call:nth-child(2) .result button")
    await page.until("document.querySelector('.message:last-child .markdown')?.textContent === 'Sunny.'")
    assert "20 degrees" in prompts(server)[1]
    assert "rain" in prompts(server)[1]


async def test_settings_go_with_the_request_and_survive_a_reload(serve, page_of):
    server = await serve("Fine")
    page = page_of(server)
    await page.open()
    await page.click("#settings-toggle")
    await page.type("#set-system", "Be brief.")
    await page.type("#set-temperature", "0.3")
    await page.type("#set-max_tokens", "40")
    await page.reload()
    await page.say("Hi")
    await page.until(ANSWERED)
    (request,) = server.engine.submitted
    assert (request.params.temperature, request.params.max_tokens) == (0.3, 40)
    assert "Be brief." in prompts(server)[0]


async def test_a_form_is_checked_by_the_server(serve, page_of):
    server = await serve("yes")
    page = page_of(server)
    await page.open()
    await page.click("#settings-toggle")
    await page.run(
        "const kinds = document.querySelector('#set-form'); kinds.value = 'grammar';"
        "kinds.dispatchEvent(new Event('input'))"
    )
    await page.click_text("Check it")
    await page.until("document.querySelector('.verdict.good')")
    await page.type("#set-form-text", "start: nothing_there", clear=True)
    await page.click_text("Check it")
    await page.until("document.querySelector('.verdict.error')?.textContent.includes('nothing_there')")


async def test_a_key_is_asked_for_typed_in_and_used(serve, page_of):
    server = await serve("Fine", api_key=("sk-right",))
    page = page_of(server)
    await page.open()
    await page.until("document.getElementById('status').textContent === 'needs a key'")
    await page.click("#key")
    await page.type("#key-input", "sk-right")
    await page.click("#key-dialog [value=save]")
    await page.until("document.getElementById('model').textContent === 'tiny'")
    await page.say("Hi")
    await page.until(ANSWERED)
    assert await page.run("return [sessionStorage.length, localStorage.getItem('oneloop.key')]") == [1, None]
    await page.click("#key")
    await page.click("#key-remember")
    await page.click("#key-dialog [value=save]")
    await page.until("sessionStorage.length === 0 && localStorage.getItem('oneloop.key') === 'sk-right'")


async def test_what_the_server_refuses_is_said_in_its_words(serve, page_of):
    server = await serve(max_model_len=64)
    page = page_of(server)
    await page.open()
    await page.say("long " * 40)
    await page.until("document.querySelector('.assistant .error')")
    (said,) = await page.texts(".assistant .error")
    assert "64" in said
    assert await page.texts("#send") == ["Send"]


async def test_a_heat_map_scores_an_answer_on_demand(serve, page_of):
    server = await serve("Hello")
    page = page_of(server)
    await page.open()
    await page.say("Hi")
    await page.until(ANSWERED)
    await page.click_text("Heat map")
    await page.until("document.querySelectorAll('.heat').length >= 5")
    assert "".join(await page.run("return [...document.querySelectorAll('.heat')].map(e => e.textContent)")).startswith(
        "Hello"
    )
    await page.click(".heat:nth-child(2)")
    (about,) = await page.texts(".heat-about")
    assert "rank 3" in about
    assert len(await page.texts(".heat-about .other code")) >= 5
    await page.press(Keys.ARROW_RIGHT)
    assert await page.run("return document.activeElement.textContent") == "l"
    await page.click_text("Heat map")
    assert await page.texts(".assistant .markdown") == ["Hello"]


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
async def test_nothing_is_cut_off_whatever_the_screen(serve, page_of, size):
    server = await serve("A long answer with `code` and\n\n```\n" + "x" * 200 + "\n```")
    page = page_of(server)
    await page.open(size=size)
    await page.say("Hi")
    await page.until(ANSWERED)
    assert await page.run("return document.documentElement.scrollWidth <= innerWidth")
    for name in ("library", "settings"):
        if await page.run(f"return document.getElementById('{name}').hidden"):
            await page.click(f"#{name}-toggle")
        within = f"const box = document.getElementById('{name}').getBoundingClientRect();"
        assert await page.run(within + "return box.left >= 0 && box.right <= innerWidth + 1")
        await page.click(f"#{name}-close")
    send = "const box = document.getElementById('send').getBoundingClientRect();"
    assert await page.run(send + "return box.right <= innerWidth && box.bottom <= innerHeight")


@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_axe_finds_nothing_serious(serve, page_of, dark):
    server = await serve(
        "# Title\n\nText with `code`, $x^2$ and [a link](https://example.com).\n\n- one\n- two\n\n```js\n1\n```"
    )
    page = page_of(server)
    await page.open(dark=dark)
    assert await page.serious() == []
    await page.say("Hi")
    await page.until(ANSWERED)
    await page.click("#settings-toggle")
    await page.click_text("Heat map")
    await page.until("document.querySelectorAll('.heat').length >= 5")
    assert await page.serious() == []
    await page.click("#key")
    assert await page.serious() == []


# Whatever can be clicked, typed into, chosen from or scrolled, and is neither hidden nor off.
_CONTROLS = """
return [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
  .filter(each => each.checkVisibility({visibilityProperty: true}) && !each.disabled && each.tabIndex >= 0).length
"""


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
async def test_the_keyboard_reaches_all_and_each_has_a_name_and_a_mark(serve, page_of, size):
    server = await serve("Fine, with `code`.\n\n```js\n1\n```")
    page = page_of(server)
    await page.open(size=size)
    await page.say("Hi")
    await page.until(ANSWERED)
    await page.type("#settings-toggle", Keys.ENTER)
    reached = await page.tabbed()
    assert [each for each in reached if not each.name] == []
    assert [each for each in reached if not each.is_marked] == []
    assert reached[0].name == "Skip to the message field"
    assert len(reached) == await page.run(_CONTROLS)


async def test_a_chat_by_keys_alone(serve, page_of):
    """Nothing is clicked: a question, its stop, another answer, a panel on a phone, and back to the message field."""
    server = await serve("Hello there", paused=True)
    page = page_of(server)
    await page.open(size=PHONE)
    assert await page.run("return document.activeElement.id") == "text"
    await page.press("Hi" + Keys.ENTER)
    await server.engine.until(lambda: bool(server.engine.live))
    await page.press(Keys.ESCAPE)
    await server.engine.until(lambda: not server.engine.live)
    await page.until("document.querySelector('.stats')?.textContent.includes('Stopped.')")
    while await page.run("return document.activeElement.textContent") != "Regenerate":
        await page.back()
    await page.press(Keys.ENTER)
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(30)
    await page.until(ANSWERED)
    await page.until("document.getElementById('announcements').textContent !== ''")
    await page.press(Keys.CONTROL + "k" + Keys.NULL)
    await page.until("document.activeElement.id === 'search'")
    await page.press(Keys.ESCAPE)
    await page.until("document.getElementById('library').hidden && document.activeElement.id === 'library-toggle'")


@contextlib.asynccontextmanager
async def proxy(port: int, prefix: str):
    """Passes on to `port` what is asked below `prefix`, and nothing else, one request a connection."""

    async def serve_one(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, rest = head.split(" ", 2)
        if not path.startswith(prefix + "/"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        rest = rest.replace("Connection: keep-alive", "Connection: close")
        to_writer.write(f"{method} {path.removeprefix(prefix)} {rest}".encode())

        async def pump(source, target):
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    target.write(data)
            target.close()

        await asyncio.gather(pump(to_reader, writer), pump(reader, to_writer))

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_it_works_below_a_path(serve, page_of):
    server = await serve("Fine", api_key=("sk-right",))
    page = page_of(server)
    async with proxy(server.port, "/models/oneloop") as port:
        page.base = f"http://127.0.0.1:{port}/models/oneloop"
        await page.open()
        await page.run("sessionStorage.setItem('oneloop.key', 'sk-right')")
        await page.reload()
        await page.until("document.getElementById('model').textContent === 'tiny'")
        await page.say("Hi")
        await page.until(ANSWERED)
        await page.open("/docs")
        await page.until("document.querySelectorAll('#contents li').length > 10")
        await page.open("/")


async def test_of_several_models_one_is_chosen_asked_and_remembered(several, page_of):
    server, turns = await several()
    page = page_of(server)
    await page.open()
    await page.until("document.getElementById('models').options.length === 2")
    assert await page.texts("#models option") == ["a", "b (loaded on demand)"]
    await page.say("Hi")
    await page.until(ANSWERED)
    await page.run("const m = document.getElementById('models'); m.value = 'b'; m.dispatchEvent(new Event('change'))")
    await page.say("And you?")
    await page.until("document.querySelectorAll('.assistant .stats').length === 2")
    await page.until("document.getElementById('models').textContent.startsWith('a (')")
    assert await page.texts(".assistant .markdown") == ["I am a", "I am b"]
    assert [text.split()[0] for text in await page.texts(".assistant .stats")] == ["a:", "b:"]
    assert await page.texts("#models option") == ["a (loaded on demand)", "b"]
    await page.open()
    await page.until("document.getElementById('models').value === 'b'")
    turns.sources["a"].engine.unhealthy = "its files are gone"
    await page.run("document.getElementById('models').value = 'a'")
    await page.say("Back to you")
    await page.until("document.querySelector('.error[role=alert]')?.textContent.includes('its files are gone')")
    await page.until("document.getElementById('models').textContent.includes('a (cannot be loaded)')")
