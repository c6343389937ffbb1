"""Dashboard and inspector in a browser."""

from __future__ import annotations

import time

import pytest

from runtime.api import (
    Finished,
    FinishReason,
    HistogramData,
    Metric,
    Request,
    RequestRecord,
    SamplingParams,
)
from tests.server.web.feed import Clock, fill
from tests.server.web.nightly.browser import PHONE, WIDE, needs_axe, needs_chromium

pytestmark = needs_chromium


async def test_the_inspector_shows_what_was_asked_and_answered(serve, page_of):
    server = await serve(log_requests=True)
    Clock(server)
    fill(server.engine)
    texts_of = server.service.texts
    ids = server.tokenizer.encode("<b>Why?</b>")
    texts_of.note(
        server.service.lifecycle.loaded,
        Finished(Request("first", ids, SamplingParams(1)), server.engine.records[0], ids[3:7]),
    )
    page = page_of(server)
    await page.open("/dashboard#requests/first")
    await page.until("document.querySelectorAll('#request-detail .text').length === 2")
    assert await page.texts("#request-detail .text") == ["<b>Why?</b>", "Why?"]


def counting(server, clock) -> None:
    """Tokens and waits that grow with each look."""
    looks, metrics = iter(range(1000)), server.engine.metrics

    def grown() -> list[Metric]:
        at = next(looks)
        return [
            *metrics(),
            Metric("generation_tokens", "", "counter", {(): 100.0 * at}),
            Metric("time_to_first_token_seconds", "", "histogram", {(): HistogramData((0.1, 0.2), (4 * at, 0, 0), at)}),
        ]

    server.engine.metrics = grown


async def test_the_dashboard_shows_what_the_feed_says(serve, page_of):
    server = await serve()
    clock = Clock(server)
    fill(server.engine)
    counting(server, clock)
    page = page_of(server)
    await page.open("/dashboard")
    assert await page.texts("#kv-used, #kv-shared, #kv-cached, #kv-free") == ["3", "2", "1", "1,018"]
    assert await page.texts("#step-words") == ["3 steps: 507 prompt tokens, 5 decodes, 67 % replayed as a graph."]
    painted = (
        "const c = document.getElementById(arguments[0]), pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        "return pixels.data.some(value => value)"
    )
    for canvas in ("blocks", "steps"):
        assert await page.run(painted, canvas)
    clock.tick()
    await page.until("document.querySelector('#tiles .tile:nth-child(3) .value').textContent !== '–'")
    await page.until("document.querySelector('#latencies td').textContent === '50.0 ms'")


async def test_the_inspector_tells_the_life_of_a_request(serve, page_of):
    server = await serve()
    Clock(server)
    fill(server.engine)
    page = page_of(server)
    await page.open("/dashboard#requests")
    assert await page.texts("#requests-body a") == ["second", "first"]
    assert await page.texts("#requests-body .state") == ["timeout", "stop"]
    await page.type("#request-search", "fir")
    await page.until("document.querySelectorAll('#requests-body tr').length === 1")
    await page.click("#requests-body a")
    await page.until("!document.getElementById('request-detail').hidden")
    (detail,) = await page.texts("#request-detail")
    for words in (
        "Queued: 500 ms",
        "Prompt: 100",
        "Decode: 400 ms",
        "Stream: 250 ms",
        "500 ms: queued, and no other request is known that ran meanwhile",
        "400 ms: 20 tokens, 21.1 ms each",
        "300 ms: preempted: the KV cache was full",
        "200 ms: the mask of its grammar was late (times: 1)",
        "200 ms: what had settled waited for a reader that was busy",
        "16 of them cached",
        "Preempted",
        "its mask was late",
        "ended: stop",
    ):
        assert words in detail
    await page.click_text("Close")
    await page.until("document.getElementById('request-detail').hidden")
    await page.click("#to-overview")
    await page.until("!document.getElementById('overview').hidden")


async def test_of_several_models_one_is_shown_and_another_can_be_chosen(several, page_of):
    server, turns = await several("abc")
    await server.chat(model="b")
    Clock(server)
    fill(turns.sources["b"].engine)
    page = page_of(server)
    await page.open("/dashboard")
    await page.until("document.getElementById('models').options.length === 3")
    assert await page.texts("#models option") == ["a (unloaded)", "b", "c (unloaded)"]
    assert await page.run("return document.querySelector('#models option:last-child').disabled")
    assert await page.texts("#step-words, #status") == ["unloaded", "No steps in the last minute."]
    await page.run("const m = document.getElementById('models'); m.value = 'b'; m.dispatchEvent(new Event('change'))")
    assert await page.texts("#step-words, #status") == [
        "",
        "3 steps: 507 prompt tokens, 5 decodes, 67 % replayed as a graph.",
    ]
    await page.click("#to-requests")
    await page.until("document.querySelectorAll('#requests-body a').length === 2")


async def test_a_request_whose_reader_is_behind_is_being_streamed(serve, page_of):
    server = await serve()
    Clock(server)
    fill(server.engine)
    now = time.monotonic()
    slow = RequestRecord(0, "slow", now - 3, now - 3, now - 2, now - 1, now - 1, 9, 0, 20, FinishReason.STOP, ())
    activity = server.engine.activity
    server.engine.activity = lambda **asked: activity(**asked)._replace(live=[slow])
    page = page_of(server)
    await page.open("/dashboard#requests/slow")
    assert (await page.texts("#requests-body .state"))[0] == "streaming"
    (detail,) = await page.texts("#request-detail")
    assert "Stream: 1" in detail
    assert "ended: stop" in detail


async def test_a_dashboard_asks_for_the_key_it_needs(serve, page_of):
    server = await serve(admin_api_key="sk-admin")
    Clock(server)
    page = page_of(server)
    await page.open("/dashboard")
    await page.until("document.getElementById('key-dialog').open")
    await page.type("#key-input", "sk-admin")
    await page.click("#key-dialog [value=save]")
    await page.until("document.getElementById('model').textContent === 'tiny'")


async def test_the_keyboard_reaches_all_and_each_has_a_name_and_a_mark(serve, page_of):
    server = await serve()
    Clock(server)
    fill(server.engine)
    page = page_of(server)
    for path, also in (("/dashboard", "Overview"), ("/dashboard#requests/first", "second")):
        await page.open(path)
        reached = await page.tabbed()
        assert [each for each in reached if not (each.name and each.is_marked)] == []
        assert reached[0].name == "Skip to the numbers"
        assert also in [each.name for each in reached]
        await page.open("/")


@needs_axe
@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (PHONE, True)], ids=["wide light", "phone dark"])
async def test_axe_finds_nothing_serious(serve, page_of, size, dark):
    server = await serve()
    Clock(server)
    fill(server.engine)
    page = page_of(server)
    for path in ("/dashboard", "/dashboard#requests/first"):
        await page.open(path, size=size, dark=dark)
        assert await page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert await page.serious() == []
        await page.open("/")
