"""A server whose model has two engines: to clients and operators they are one, by metrics and on the dashboard two."""

from __future__ import annotations

import pytest

from runtime.api import CallerLimit
from tests.fakes import FakeEngine, fake_model

EOS = 2


@pytest.fixture
def second() -> FakeEngine:
    return FakeEngine(lambda request: [*request.prompt_ids[:1], EOS], model=fake_model(), paused=True)


async def test_requests_go_to_both_and_are_counted_by_engine(serve, second):
    server = await serve(paused=True, more_engines=(second,))
    streams = [
        await server.open_stream("/v1/completions", prompt="Hi", stream=True, model="tiny", max_tokens=2)
        for _ in range(2)
    ]
    await server.engine.until(lambda: bool(server.engine.live))
    await second.until(lambda: bool(second.live))
    assert (await server.http.get("/health")).json() == {"status": "ok", "running": 2, "waiting": 0}
    assert (await server.http.get("/load")).json() == {"server_load": 2}
    text = (await server.http.get("/metrics")).text
    for number in "01":
        assert f'oneloop:num_requests_running{{engine="{number}",model_name="tiny"}} 1.0' in text
    answer = await server.post("/abort_requests", {"abort_all": True})
    assert answer.json() == {"aborted": 2}
    for stream in streams:
        stream.leave()


async def test_a_dead_replica_is_a_server_that_is_to_be_replaced(serve, second):
    server = await serve(more_engines=(second,))
    second.die("its device is gone")
    answer = await server.http.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "its device is gone")
    assert (await server.http.get("/health/live")).status_code == 503
    assert await server.service.lifecycle.death() == "replica 1: its device is gone"


async def test_a_client_is_refused_where_the_replica_for_its_request_refuses(serve, second):
    server = await serve(more_engines=(second,))
    server.engine.refuse = CallerLimit("it has enough", "max_num_seqs_per_key", 3.0)
    answer = await server.complete(prompt="Hi", max_tokens=2)
    assert answer.status_code == 429


async def test_all_sleep_and_all_wake(serve, second):
    server = await serve(more_engines=(second,))
    assert (await server.http.post("/sleep")).json() == {"is_sleeping": True}
    assert second.sleep_level > 0
    assert (await server.http.post("/wake_up")).json() == {"is_sleeping": False}
