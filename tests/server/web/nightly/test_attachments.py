"""Files beside a message on the chat page: texts, sounds, what is spoken, and what cannot be used."""

from __future__ import annotations

import pytest

from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from tests.server.media.processors import written
from tests.server.media.reading import reader
from tests.server.media.sounds import sine, wav
from tests.server.web.nightly.browser import Page, needs_axe, needs_chromium
from tests.server.web.nightly.test_chat import ANSWERED, prompts
from tests.server.web.nightly.test_pictures import BRING, files

pytestmark = needs_chromium
WORDS = "document.getElementById('attached-words').textContent"
TWO_S = wav(sine(2.0))


async def drop(page: Page, *given: tuple[str, str, bytes]) -> None:
    assert await page.run(BRING, "main", "drop", files(*given))


async def test_a_text_goes_into_the_prompt_with_its_name_and_size(serve, page_of):
    server = await serve("Fine", max_model_len=4096)
    page = page_of(server)
    await page.open()
    await page.until("document.getElementById('model').textContent")
    await drop(page, ("notes.py", "text/x-python", b"x = '```'\n"), ("of.csv", "", "a;ü".encode()))
    await page.until("document.querySelectorAll('#attached li').length === 2")
    assert await page.texts("#attached .chip") == ["notes.py 10 B", "of.csv 4 B"]
    await page.click("#attached li:nth-child(2) button")
    await page.say("What is it?")
    await page.until(ANSWERED)
    assert "File notes.py (10 bytes):\n````\nx = '```'\n\n````\n\nWhat is it?" in prompts(server)[0]
    assert "of.csv" not in prompts(server)[0]
    await page.reload()
    assert await page.texts(".user .chip summary") == ["notes.py 10 B"]
    assert await page.texts(".own") == ["What is it?"]


async def test_a_long_text_is_cut_and_both_are_told(serve, page_of):
    server = await serve("Fine", max_model_len=2048)
    page = page_of(server)
    await page.open()
    await page.until("document.getElementById('model').textContent")
    await drop(page, ("log.txt", "text/plain", b"word " * 100_000))
    await page.until("document.querySelectorAll('#attached li').length === 1")
    assert await page.texts("#attached .chip") == ["log.txt 500.0 kB, cut: the first 4,096 characters"]
    read = "return await m.readText(new File([args[0]], 'a'), 4).then(({text, cut}) => [text, cut])"
    assert await page.imported("texts.js", read, "12345678") == ["12345678", False]
    assert await page.imported("texts.js", read, "1234567ü") == ["1234567ü", False]
    assert await page.imported("texts.js", read, "ü" * 9) == ["ü" * 8, True]
    assert await page.imported("texts.js", read, "1234567🦊") == ["1234567", True], "half a character is none"


async def test_what_cannot_be_used_says_why_and_the_rest_is_taken(serve, page_of):
    page = page_of(await serve("Fine", max_model_len=2048))
    await page.open()
    await page.until("document.getElementById('model').textContent")
    await drop(
        page,
        ("a.pdf", "application/pdf", b"%PDF-1.7\n\xff\xfe\x00"),
        ("b.zip", "application/zip", b"PK\x03\x04\x00\x00"),
        ("c.mp3", "audio/mpeg", b"ID3"),
        ("d.mp4", "video/mp4", b"\x00"),
        ("e.txt", "text/plain", b"Hi"),
    )
    await page.until("document.querySelectorAll('#attached li').length === 1")
    said = await page.run(f"return {WORDS}")
    assert "a.pdf: this page cannot read PDF. Copy the text out of it, or save it as text." in said
    assert "b.zip: it is no text, picture or sound that this page can read." in said
    assert "c.mp3: neither does this model hear, nor is there one that writes down speech." in said
    assert "d.mp4: this page sends no videos." in said
    assert await page.run("return document.getElementById('microphone').hidden")


@pytest.fixture
def hearing(serve, page_of, tmp_path):
    """A page at a server whose model hears, by Qwen2-Audio's processor."""

    async def start():
        tiny = written("qwen2_audio", tmp_path)
        spoken = Tokenizer.from_folder(tiny.folder)
        template = ChatTemplate(spoken.chat_template, spoken.named_tokens)
        server = await serve("Yes", speaks=spoken, template=template, media=reader(tiny), max_model_len=4096)
        page = page_of(server)
        await page.open()
        await page.until("!document.getElementById('microphone').hidden")
        return server, page

    return start


async def test_a_model_that_hears_is_sent_sounds(hearing):
    server, page = await hearing()
    await drop(page, ("tone.wav", "audio/wav", TWO_S), ("torn.ogg", "audio/ogg", b"OggS"))
    await page.until("document.querySelectorAll('#attached li').length === 1")
    await page.until(f"{WORDS} === 'torn.ogg: this browser cannot play it.'")
    await page.say("What is it?")
    await page.until(ANSWERED)
    assert [len(request.media) for request in server.engine.submitted] == [1]
    await page.say("Again?")
    await page.until("document.querySelectorAll('.assistant .stats').length === 2")
    assert [len(request.media) for request in server.engine.submitted] == [1, 1]


async def test_a_sound_is_one_channel_at_16_khz(hearing):
    _, page = await hearing()
    read = (
        "const wav = await m.toWav(new File([Uint8Array.from(atob(args[0]), each => each.charCodeAt(0))], 'a'));"
        "const bytes = new DataView(await wav.arrayBuffer());"
        "return [wav.size, bytes.getUint16(22, true), bytes.getUint32(24, true), bytes.getInt16(44 + 2 * 400, true)]"
    )
    stereo = wav([sine(1.0, 16_000), 0 * sine(1.0, 16_000)], 16_000)
    size, channels, rate, sample = await page.imported("sounds.js", read, files(("a", "", stereo))[0][2])
    assert (size, channels, rate) == (44 + 2 * 16_000, 1, 16_000)
    assert abs(sample - 32767 * sine(1.0)[400] / 2) < 40


# A server with a model that writes down speech, as the page sees one; what it is sent is kept in `heard`.
SPEECH = """
const asked = window.fetch;
window.heard = [];
window.fetch = async (address, options) => {
  if (String(address).endsWith("/v1/audio/transcriptions")) {
    heard.push([options.body.get("model"), options.body.get("file").size]);
    return new Response(JSON.stringify({text: " What was said. "}));
  }
  const response = await asked(address, options);
  if (!String(address).endsWith("/v1/models")) return response;
  const found = await response.json();
  found.data.push({...found.data[0], id: "whisper", root: "whisper", tasks: ["transcribe", "translate"]});
  return new Response(JSON.stringify(found));
};
"""


async def test_speech_is_written_down_where_the_server_can(serve, page_of):
    server = await serve("Fine", max_model_len=2048)
    page = page_of(server)
    await page.open()
    await page.until("document.getElementById('model').textContent")
    assert await page.run("return document.getElementById('microphone').hidden")
    await page.run(SPEECH)
    await page.imported("models.js", "await m.refresh()")
    await page.imported("attachments.js", "m.refresh()")
    assert await page.run("return document.getElementById('models').hidden"), "it is no model to chat with"
    await drop(page, ("talk.wav", "audio/wav", TWO_S))
    await page.until("document.querySelectorAll('#attached li').length === 1")
    assert await page.texts("#attached .chip") == ["Transcript of talk.wav 14 B"]
    assert await page.run("return heard") == [["whisper", len(TWO_S)]]
    await page.type("#text", "Listen:")
    await page.click("#microphone")
    await page.until("document.getElementById('microphone').getAttribute('aria-pressed') === 'true'")
    await page.click("#microphone")
    await page.until("document.activeElement.id === 'text' && heard.length === 2")
    assert await page.run("return document.getElementById('text').value") == "Listen: What was said."
    await page.click("#send")
    await page.until(ANSWERED)
    assert "What was said." in prompts(server)[0]


@needs_axe
async def test_axe_finds_nothing_serious_beside_texts(serve, page_of):
    page = page_of(await serve("Fine", max_model_len=2048))
    await page.open()
    await page.until("document.getElementById('model').textContent")
    await drop(page, ("a.txt", "text/plain", b"Hi"), ("b.pdf", "application/pdf", b"\xff"))
    await page.until("document.querySelectorAll('#attached li').length === 1")
    assert await page.serious() == []
    await page.say("What is it?")
    await page.until(ANSWERED)
    assert await page.serious() == []
