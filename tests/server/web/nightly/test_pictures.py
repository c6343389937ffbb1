"""Pictures on the chat page: dropped, pasted and chosen, where the model sees; shown, sent, kept, and given up again."""

from __future__ import annotations

import base64
import io
import json

import pytest
from PIL import Image

from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from tests.server.media.pictures import data_url, drawn, stored
from tests.server.media.processors import written
from tests.server.media.reading import reader
from tests.server.web.nightly.browser import PHONE, needs_axe, needs_chromium

pytestmark = needs_chromium
SMALL = stored(drawn())
ANSWERED = "document.querySelectorAll('.message.assistant .stats').length === %d"
# Files as a browser brings them: to the element, with the event of that name.
BRING = """
const [target, kind, files] = arguments, data = new DataTransfer();
const bytes = text => Uint8Array.from(atob(text), each => each.charCodeAt(0));
for (const [name, type, text] of files) data.items.add(new File([bytes(text)], name, {type}));
const Event = kind === "paste" ? ClipboardEvent : DragEvent;
const event = new Event(kind, {bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data});
document.querySelector(target).dispatchEvent(event);
return event.defaultPrevented;
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return written("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def opened(serve, page_of, tiny):
    """A page at a server whose model sees, by LLaVA's processor."""

    async def start(**options):
        spoken = Tokenizer.from_folder(tiny.folder)
        template = ChatTemplate(spoken.chat_template, spoken.named_tokens)
        server = await serve("Yes", speaks=spoken, template=template, media=reader(tiny), max_model_len=4096)
        page = page_of(server)
        await page.open(**options)
        await page.until("document.getElementById('model').textContent")
        return server, page

    return start


def files(*given: tuple[str, str, bytes]) -> list[list[str]]:
    return [[name, kind, base64.b64encode(data).decode()] for name, kind, data in given]


def seen(server) -> list[int]:
    """How many pictures each request had."""
    return [len(request.media) for request in server.engine.submitted]


async def test_pictures_are_dropped_pasted_and_chosen_and_sent_in_their_order(opened, tmp_path):
    server, page = await opened()
    chosen = tmp_path / "chosen.png"
    chosen.write_bytes(stored(drawn(seed=1)))
    assert await page.run(BRING, "main", "drop", files(("dropped.png", "image/png", SMALL)))
    await page.until("document.querySelectorAll('#attached img').length === 1")
    assert await page.run(BRING, "#text", "paste", files(("pasted.jpg", "image/jpeg", stored(drawn(), "JPEG"))))
    await page.until("document.querySelectorAll('#attached img').length === 2")
    await page.type("#attach-file", str(chosen))
    await page.until("document.querySelectorAll('#attached img').length === 3")
    alts = "return [...document.querySelectorAll(arguments[0])].map(each => each.alt)"
    assert await page.run(alts, "#attached img") == ["dropped.png", "pasted.jpg", "chosen.png"]
    await page.click("#attached li:nth-child(2) button")
    await page.say("What is it?")
    await page.until(ANSWERED % 1)
    assert seen(server) == [2]
    assert await page.run(alts, ".message.user img") == ["Picture 1", "Picture 2"]
    sources = await page.run("return [...document.querySelectorAll('.message.user img')].map(each => each.src)")
    assert sources == [data_url(SMALL), data_url(chosen.read_bytes())]
    assert await page.run("return document.getElementById('attached').hidden")


async def test_a_picture_may_go_without_words_stays_when_they_are_edited_and_is_kept(opened):
    server, page = await opened()
    await page.run(BRING, "main", "drop", files(("one.png", "image/png", SMALL)))
    await page.until("document.querySelectorAll('#attached img').length === 1")
    await page.click("#send")
    await page.until(ANSWERED % 1)
    assert "A picture" in (await page.texts("#conversations li"))[0]
    await page.say("And now?")
    await page.until(ANSWERED % 2)
    assert seen(server) == [1, 1], "what was said before goes along"
    await page.reload()
    await page.until("document.querySelectorAll('.message.user img').length === 1")
    await page.run(BRING, "main", "drop", files(("two.png", "image/png", SMALL)))
    await page.until("document.querySelectorAll('#attached img').length === 1")
    await page.say("This one")
    await page.until(ANSWERED % 3)
    await page.click_text("Edit", within=".user")
    await page.type(".edit textarea", "That one", clear=True)
    await page.click(".edit .main")
    await page.until("document.querySelector('.message.user:nth-last-child(2) .own')?.textContent === 'That one'")
    await page.until(ANSWERED % 3)
    assert seen(server) == [1, 1, 2, 2]


async def test_what_is_large_is_drawn_smaller_and_what_is_none_is_said(opened):
    server, page = await opened()
    large = stored(drawn(2500, 600), "BMP")
    assert len(large) > 3 << 20
    await page.run(BRING, "main", "drop", files(("large.bmp", "image/bmp", large)))
    await page.until("document.querySelectorAll('#attached img').length === 1")
    kind, _, data = (await page.run("return document.querySelector('#attached img').src")).partition(",")
    assert kind == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (2048, 492)
    await page.run(BRING, "main", "drop", files(("torn.tga", "image/x-tga", b"nothing")))
    await page.until("document.getElementById('attached-words').textContent.includes('torn.tga')")
    await page.say("Look")
    await page.until(ANSWERED % 1)
    assert seen(server) == [1]


async def test_a_model_that_reads_text_is_sent_none(serve, page_of):
    server = await serve("Fine")
    page = page_of(server)
    await page.open()
    await page.until("document.getElementById('model').textContent === 'tiny'")
    assert await page.run(BRING, "main", "drop", files(("one.png", "image/png", SMALL)))
    await page.until(
        "document.getElementById('attached-words').textContent === 'one.png: this model does not read pictures.'"
    )
    await page.say("Hi")
    await page.until(ANSWERED % 1)
    assert await page.texts("#attached-words") == [""]


async def test_a_file_brings_pictures_and_nothing_that_only_looks_like_one(opened):
    _, page = await opened()

    def kept(url: str) -> str:
        node = {"id": "n", "role": "user", "content": "Hi", "children": [], "pictures": [url]}
        return json.dumps({"oneloop": 1, "conversations": [{"nodes": {"n": node}, "roots": ["n"]}]})

    found = await page.imported("tree.js", "return m.imported(args[0])[0].nodes.n.pictures", kept(data_url(SMALL)))
    assert found == [data_url(SMALL)]
    for url in (
        "https://example.com/a.png",
        "data:text/html;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "javascript:1",
    ):
        read = "try { return m.imported(args[0]).length; } catch (error) { return error.message; }"
        assert "damaged" in await page.imported("tree.js", read, kept(url))


@needs_axe
async def test_axe_finds_nothing_serious_beside_pictures(opened):
    _, page = await opened(size=PHONE, dark=True)
    await page.run(BRING, "main", "drop", files(("one.png", "image/png", SMALL)))
    await page.until("document.querySelectorAll('#attached img').length === 1")
    assert await page.run("return document.documentElement.scrollWidth <= innerWidth")
    assert await page.serious() == []
    await page.say("What is it?")
    await page.until(ANSWERED % 1)
    assert await page.serious() == []
