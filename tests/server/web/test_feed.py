"""Feed of dashboard and inspector: an event when a test says that a second has passed."""

from __future__ import annotations

import asyncio
import json
import time

from runtime.api import (
    Finished,
    Request,
    RequestRecord,
    SamplingParams,
    StepRecord,
)
from server.models import dashboard
from server.models.dashboard import RecentTexts
from server.models.defaults import sampling_defaults
from tests.fakes import FakeEngine
from tests.server.conftest import RawAnswer
from tests.server.tiny import chatml, loaded_model
from tests.server.web.feed import Clock, fill

FEED = "/dashboard/feed"
TEXTS = "/dashboard/texts"


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
    loaded = loaded_model(FakeEngine(), tokenizer, chatml(tokenizer), sampling_defaults(), ("tiny",))

    def finished(name: str, num: int) -> Finished:
        request = Request(name, [7] * num, SamplingParams(1))
        return Finished(request, RequestRecord(1, name, 0.0, *[None] * 4, num, 0, 1, None, ()), [8])

    kept = RecentTexts()
    for number in range(dashboard.MAX_REQUESTS + 5):
        kept.note(loaded, finished(f"r{number}", 3))
    assert kept.find("r4") is None
    assert kept.find("r5") == (loaded, [7] * 3, [8])
    kept.note(loaded, finished("large", dashboard.MAX_TOKENS - 10))
    assert kept.find("large") is not None
    assert kept.find(f"r{dashboard.MAX_REQUESTS + 4}") is not None
    assert kept.find(f"r{dashboard.MAX_REQUESTS}") is None
    kept.note(loaded, finished("huge", dashboard.MAX_TOKENS))  # more than all may have
    assert kept.find("huge") is None
    kept.note(loaded, finished("small", 1))
    assert kept.find("small") is not None


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
