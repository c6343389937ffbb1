"""Dashboard and inspector in a browser, and the feed that they live on: an event when a test says that a second has passed."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from runtime.api import (
    Finished,
    FinishReason,
    HistogramData,
    Metric,
    Request,
    RequestEvent,
    RequestRecord,
    SamplingParams,
    StepRecord,
)
from server.models import texts
from server.models.defaults import SamplingDefaults
from server.models.feed import Feed
from server.models.texts import Texts
from tests.fakes import FakeEngine
from tests.server.conftest import RawAnswer
from tests.server.tiny import chatml, loaded_model
from tests.server.web.browser import PHONE, WIDE, needs_axe, needs_chromium

FEED = "/dashboard/feed"


class Clock:
    """In place of the feed's seconds: one passes when `tick` is called."""

    def __init__(self, server) -> None:
        self.feed: Feed = server.service.added_part(Feed)
        self.feed._tick = self._wait
        self._turns = asyncio.Semaphore(0)

    async def _wait(self) -> None:
        await self._turns.acquire()

    def tick(self) -> None:
        self._turns.release()


def fill(engine) -> None:
    """A history of three steps and two requests, a second ago."""
    now = time.monotonic() - 1
    engine.steps += [
        StepRecord(1, now, now + 0.05, 500, 0, 0, False, None),
        StepRecord(2, now + 0.05, now + 0.06, 0, 3, 0, True, 0.002),
        StepRecord(3, now + 0.07, now + 0.08, 7, 2, 1, True, 0.01),
    ]
    events = (
        RequestEvent("chunk", now, 400),
        RequestEvent("preempted", now + 0.2, 0),
        RequestEvent("deferred", now + 0.3, 0),
    )
    engine.records += [
        RequestRecord(
            1, "first", now - 0.5, now, now + 0.1, now + 0.5, now + 0.5, 400, 16, 20, FinishReason.STOP, events, now + 0.75, 0.2
        ),
        RequestRecord(2, "second", now, None, None, None, now + 0.5, 9, 0, 0, FinishReason.TIMEOUT, (), now + 0.5),
    ]  # fmt: skip
    engine.kv_cells = bytes([255, 0, 0] * 3 + [0, 255, 0] * 2 + [0, 0, 255] + [0, 0, 0] * 1018)


async def events_of(stream):
    """The feed's snapshots, one after another."""
    await stream.head()
    while body := await stream.chunk():
        for event in body.decode().split("\n\n"):
            if event.startswith("data: "):
                yield json.loads(event.removeprefix("data: "))


async def opened(server):
    raw = await server.raw()
    raw.send(b"GET /dashboard/feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return RawAnswer(raw._reader, raw._writer)


# --- the feed -----------------------------------------------------------------------------------------------------


async def test_who_comes_is_told_all_and_then_what_is_new(serve):
    server = await serve(paused=True)
    clock, engine = Clock(server), server.engine
    fill(engine)
    stream = await opened(server)
    snapshots = events_of(stream)
    (first,) = (await anext(snapshots))["models"]
    assert [step[0] for step in first["steps"]] == [1, 2, 3]
    assert [record[1] for record in first["requests"]] == ["first", "second"]
    assert (first["name"], first["status"]) == ("tiny", "loaded")
    assert first["kv"]["num_blocks"] == 1024
    now = time.monotonic()
    engine.steps.append(StepRecord(4, now, now, 0, 1, 0, True, None))
    clock.tick()
    (second,) = (await anext(snapshots))["models"]
    assert [step[0] for step in second["steps"]] == [4]
    assert second["requests"] == []
    chat = asyncio.create_task(server.chat())
    await engine.until(lambda: bool(engine.live))
    clock.tick()
    assert len((await anext(snapshots))["models"][0]["live"]) == 1
    engine.step(20)
    await chat
    stream.leave()


async def test_one_snapshot_is_made_for_all_and_none_when_nobody_watches(serve):
    server = await serve()
    clock, asked = Clock(server), []
    metrics = server.engine.metrics
    server.engine.metrics = lambda: asked.append(1) or metrics()
    assert clock.feed._ticker is None
    streams = [await opened(server) for _ in range(3)]
    watchers = [events_of(stream) for stream in streams]
    for each in watchers:
        await anext(each)
    assert len(asked) == 3
    clock.tick()
    for each in watchers:
        await anext(each)
    assert len(asked) == 4
    for stream in streams:
        stream.leave()
    ticker = clock.feed._ticker
    await asyncio.wait([ticker])
    assert clock.feed._ticker is None
    clock.tick()
    await asyncio.sleep(0)
    assert len(asked) == 4


async def test_draining_ends_the_feed(serve):
    server = await serve()
    Clock(server)
    stream = await opened(server)
    snapshots = events_of(stream)
    await anext(snapshots)
    server.service.lifecycle.drain()
    assert [each async for each in snapshots] == []


async def test_it_is_for_who_may_see_the_metrics(serve):
    server = await serve(api_key=("sk-user",), admin_api_key="sk-admin")
    Clock(server)
    assert (await server.http.get("/dashboard")).status_code == 200
    assert (await server.http.get(FEED)).status_code == 401
    assert (await server.http.get(FEED, headers={"x-api-key": "sk-user"})).status_code == 403
    async with server.http.stream("GET", FEED, headers={"x-api-key": "sk-admin"}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")


async def test_there_is_a_feed_before_there_is_a_model(serve):
    server = await serve(loaded=False)
    Clock(server)
    stream = await opened(server)
    assert (await anext(events_of(stream)))["status"] == "loading"
    stream.leave()


# --- texts --------------------------------------------------------------------------------------------------------

TEXTS = "/dashboard/texts"


async def test_what_was_asked_and_answered_is_kept_only_where_it_shall_be(serve):
    for keeps in (False, True):
        server = await serve(log_requests=keeps)
        await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 50}, headers={"x-request-id": "mine"})
        found = await server.http.get(TEXTS, params={"id": "cmpl-mine-0"})
        if keeps:
            assert found.json() == {"prompt": "Hi", "answer": "Hello there<|eos|>"}
        else:
            assert found.status_code == 404
            assert "--log-requests" in found.json()["error"]["message"]
        assert (await server.http.get(TEXTS, params={"id": "nobody"})).status_code == 404
        assert (await server.http.get(TEXTS)).status_code == 400
        stream = await opened(server)
        assert (await anext(events_of(stream)))["has_texts"] == keeps
        stream.leave()


async def test_a_user_does_not_read_what_others_asked(serve):
    server = await serve(log_requests=True, api_key=("sk-user",))
    response = await server.http.get(TEXTS, params={"id": "x"}, headers={"x-api-key": "sk-user"})
    assert response.status_code == 403


async def test_what_is_kept_is_bounded_in_requests_and_in_tokens(tokenizer):
    loaded = loaded_model(FakeEngine(), tokenizer, chatml(tokenizer), SamplingDefaults(), ("tiny",))

    def finished(name: str, num: int) -> Finished:
        request = Request(name, [7] * num, SamplingParams(1))
        return Finished(request, RequestRecord(1, name, 0.0, *[None] * 4, num, 0, 1, None, ()), [8])

    kept = Texts()
    for number in range(texts.MAX_REQUESTS + 5):
        kept.note(loaded, finished(f"r{number}", 3))
    assert kept.find("r4") is None
    assert kept.find("r5") == (loaded, [7] * 3, [8])
    kept.note(loaded, finished("large", texts.MAX_TOKENS - 10))
    assert kept.find("large") is not None
    assert kept.find(f"r{texts.MAX_REQUESTS + 4}") is not None
    assert kept.find(f"r{texts.MAX_REQUESTS}") is None
    kept.note(loaded, finished("huge", texts.MAX_TOKENS))  # more than all may have
    assert kept.find("huge") is None
    kept.note(loaded, finished("small", 1))
    assert kept.find("small") is not None


@needs_chromium
async def test_the_inspector_shows_what_was_asked_and_answered(serve, page_of):
    server = await serve(log_requests=True)
    Clock(server)
    fill(server.engine)
    texts_of = server.service.added_part(Texts)
    ids = server.tokenizer.encode("<b>Why?</b>")
    texts_of.note(
        server.service.lifecycle.loaded,
        Finished(Request("first", ids, SamplingParams(1)), server.engine.records[0], ids[3:7]),
    )
    page = page_of(server)
    await page.open("/dashboard#requests/first")
    await page.until("document.querySelectorAll('#request-detail .text').length === 2")
    assert await page.texts("#request-detail .text") == ["<b>Why?</b>", "Why?"]


# --- the pages ----------------------------------------------------------------------------------------------------


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


@needs_chromium
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


@needs_chromium
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
        "waited 200 ms in all for a reader that was busy",
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


async def test_the_feed_tells_of_every_model_what_is_its_own(several):
    server, turns = await several("abc")
    clock = Clock(server)
    stream = await opened(server)
    snapshots = events_of(stream)
    first = await anext(snapshots)
    assert [(each["name"], each["status"]) for each in first["models"]] == [("a", "loaded")]
    assert first["unloaded"] == [{"name": "b", "status": "unloaded"}, {"name": "c", "status": "unloaded"}]
    await server.chat(model="b")
    fill(turns.sources["b"].engine)
    clock.tick()
    second = await anext(snapshots)
    told = [(each["name"], each["status"], len(each["steps"])) for each in second["models"]]
    assert told == [("a", "unloaded", 0), ("b", "loaded", 3)]
    clock.tick()
    assert [len(each["steps"]) for each in (await anext(snapshots))["models"]] == [0, 0]
    stream.leave()


async def test_replicas_of_a_model_have_an_entry_each(serve):
    second = FakeEngine()
    server = await serve(more_engines=(second,))
    fill(second)
    stream = await opened(server)
    snapshot = await anext(events_of(stream))
    found = [(each["name"], len(each["steps"])) for each in snapshot["models"]]
    assert found == [("tiny (engine 0)", 0), ("tiny (engine 1)", 3)]
    stream.leave()


async def test_texts_are_read_as_their_own_model_writes(several):
    server, _ = await several(log_requests=True)
    await server.post("/v1/completions", {"prompt": "Hi", "model": "b"}, headers={"x-request-id": "mine"})
    found = await server.http.get(TEXTS, params={"id": "cmpl-mine-0"})
    assert found.json() == {"prompt": "Hi", "answer": "I am b<|eos|>"}


@needs_chromium
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


@needs_chromium
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


@needs_chromium
async def test_a_dashboard_asks_for_the_key_it_needs(serve, page_of):
    server = await serve(admin_api_key="sk-admin")
    Clock(server)
    page = page_of(server)
    await page.open("/dashboard")
    await page.until("document.getElementById('key-dialog').open")
    await page.type("#key-input", "sk-admin")
    await page.click("#key-dialog [value=save]")
    await page.until("document.getElementById('model').textContent === 'tiny'")


@needs_chromium
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


@needs_chromium
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
