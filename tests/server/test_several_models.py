"""Several models behind one port: what clients of each API see of them while they take turns."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.server.conftest import MESSAGES
from tests.server.swapping import until


def said(answer) -> str:
    return answer.json()["choices"][0]["message"]["content"]


async def test_the_model_that_a_request_names_answers_it(several):
    server, turns = await several()
    for letter in "abba":
        answer = await server.chat(model=letter)
        assert (answer.status_code, said(answer), answer.json()["model"]) == (200, f"I am {letter}", letter)
    assert said(await server.chat()) == "I am a", "without a name it is the first"
    assert (turns["a"].num_swaps, turns["b"].num_swaps) == (1, 1)
    assert all(model.num_users == 0 for model in turns.swaps.models)
    assert turns.sources["b"].loaded_for is None, "its engine's log would name the request that came first for ever"


async def test_a_name_that_is_none_of_them_is_refused_with_all_names(several):
    server, _ = await several()
    answer = await server.chat(model="c")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "'a', 'b'" in answer.json()["error"]["message"]


CALLS = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/completion": {"prompt": "Hi"},
    "/invocations": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", CALLS)
async def test_every_api_has_it_loaded(several, path):
    server, turns = await several()
    answer = await server.post(path, {**CALLS[path], "model": "b"})
    assert (answer.status_code, turns["b"].status) == (200, "loaded"), answer.text
    assert "I am b" in answer.text


CHATS = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/invocations": {"messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", CHATS)
async def test_a_model_without_a_chat_template_is_not_loaded_to_refuse_a_chat(several, path):
    server, turns = await several()
    turns.sources["b"].chats = False
    turns.sources["b"].may_outline.set()
    await until(lambda: turns["b"].outline is not None)
    answer = await server.post(path, {**CHATS[path], "model": "b"})
    assert (answer.status_code, turns["b"].status, turns["b"].num_swaps) == (400, "unloaded", 0), answer.text
    assert "this model has no chat template" in answer.text
    # Once it has been loaded for a prompt and unloaded again, it is not loaded either.
    assert (await server.complete(model="b")).status_code == 200
    assert (await server.complete(model="a")).status_code == 200
    answer = await server.post(path, {**CHATS[path], "model": "b"})
    assert (answer.status_code, turns["b"].num_swaps) == (400, 1), answer.text


async def test_a_model_that_only_embeds_is_not_loaded_to_refuse_a_chat(several):
    server, turns = await several()
    turns.sources["b"].tasks = ("embed",)
    turns.sources["b"].may_outline.set()
    await until(lambda: turns["b"].outline is not None)
    answer = await server.chat(model="b")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "task_not_supported")
    assert turns["b"].num_swaps == 0


async def test_a_stream_is_never_cut_and_its_model_goes_when_it_has_ended(several):
    server, turns = await several(paused=True)
    stream = await server.open_stream("/v1/completions", prompt="Hi", stream=True, model="a")
    await stream.head()
    one, other = turns.sources["a"].engine, turns.sources["b"].engine
    one.step()
    await stream.chunk()
    waits = asyncio.create_task(server.complete(model="b"))
    await until(lambda: turns["b"].waiting)
    one.step(2)
    await stream.chunk()
    assert (turns["b"].status, one.sleep_level) == ("unloaded", 0)
    one.step(10)
    ending = b"".join(await stream.chunks())
    assert b'"finish_reason":"stop"' in ending
    await other.until(lambda: bool(other.live))
    assert one.sleep_level == 1
    other.step(10)
    assert (await waits).json()["choices"][0]["text"] == "I am b"


async def test_a_client_that_leaves_while_it_waits_is_forgotten(several):
    server, turns = await several(paused=True)
    stream = await server.open_stream("/v1/completions", prompt="Hi", stream=True, model="a")
    await stream.head()
    for path, body in {**CALLS, "/v1/chat/completions": {"messages": MESSAGES}}.items():
        gone = await server.open_stream(path, **body, model="b")
        await until(lambda: turns["b"].waiting)
        gone.leave()
        await until(lambda: not turns["b"].waiting)
    turns.sources["a"].engine.step(20)
    assert b"stop" in b"".join(await stream.chunks())
    assert (turns["b"].num_swaps, turns["a"].num_users) == (0, 0)


async def test_a_broken_model_is_an_error_of_its_own_requests(several):
    server, turns = await several()
    turns.sources["b"].broken = "its weights are torn"
    answer = await server.chat(model="b")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (503, "model_load_failed", "model")
    assert "its weights are torn" in error["message"]
    assert (answer.headers["x-should-retry"], answer.headers["retry-after"]) == ("false", "60")
    assert (await server.chat(model="a")).status_code == 200
    listed = {card["id"]: card["status"] for card in (await server.http.get("/v1/models")).json()["data"]}
    assert listed == {"a": {"value": "loaded", "failed": False}, "b": {"value": "unloaded", "failed": True}}


async def test_a_full_line_is_429_and_a_time_that_is_over_504(several):
    server, turns = await several(paused=True)
    turns.swaps._max_waiting = 1
    stream = await server.open_stream("/v1/completions", prompt="Hi", stream=True, model="a")
    await stream.head()
    waits = asyncio.create_task(server.chat(model="b", timeout=7.0))
    await until(lambda: turns["b"].waiting)
    refused = await server.chat(model="b")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    waits.cancel()
    stream.leave()


async def test_who_waits_for_a_model_is_counted_and_ends_when_its_time_is_over(several):
    server, turns = await several(paused=True)
    stream = await server.open_stream("/v1/completions", prompt="Hi", stream=True, model="a")
    await stream.head()
    for sent, headers in (({}, {"x-request-timeout": "5"}), ({"timeout": 5.0}, {})):
        turns.timers.now_s = time.monotonic()  # as requests have it; it stands still
        if sent:  # where nothing of it is known, a body's limit counts from when its model is
            await turns.sources["b"].prepare()
            turns["b"].loaded = await turns.sources["b"].load()
        asked = asyncio.create_task(
            server.post("/v1/completions", {"prompt": "Hi", "model": "b", **sent}, headers=headers)
        )
        await until(lambda: turns["b"].waiting)
        assert (await server.http.get("/health")).json()["waiting"] == 1
        assert (await server.http.get("/load")).json() == {"server_load": 2}
        turns.timers.pass_s(6)
        late = await asked
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert turns.swaps.num_waiting == 0
    stream.leave()


async def test_lists_say_where_each_stands(several):
    server, _ = await several()
    first = (await server.http.get("/v1/models")).json()
    assert [(card["id"], card["status"]["value"], card["max_model_len"]) for card in first["data"]] == [
        ("a", "loaded", 512), ("b", "unloaded", None),
    ]  # fmt: skip
    assert (await server.http.get("/v1/models/b")).json()["tasks"] is None
    assert (await server.http.get("/health")).json()["models"] == {"a": "loaded", "b": "unloaded"}
    await server.chat(model="b")
    then = (await server.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["status"]["value"], card["max_model_len"]) for card in then] == [
        ("a", "unloaded", 512), ("b", "loaded", 512),
    ]  # fmt: skip
    health = (await server.http.get("/health")).json()
    assert (health["status"], health["models"]) == ("ok", {"a": "unloaded", "b": "loaded"})
    assert "sleep_level" not in health


async def test_what_was_never_loaded_is_described_by_its_files(several):
    server, turns = await several()
    assert (await server.http.get("/v1/models/b")).json()["max_model_len"] is None
    turns.sources["b"].may_outline.set()
    await until(lambda: turns["b"].outline)
    card = (await server.http.get("/v1/models/b")).json()
    assert (card["max_model_len"], card["max_input_tokens"]) == (1024, 1024)
    assert (card["modalities"], card["tasks"], card["status"]["value"]) == (["text", "image"], ["generate"], "unloaded")
    assert turns.sources["b"].num_prepared == turns.sources["b"].num_loaded == 0
    await server.chat(model="b")
    assert (await server.http.get("/v1/models/b")).json()["max_model_len"] == 512, "as it came to be"


async def test_health_is_200_while_one_makes_room_for_another_and_nothing_is_probed(several):
    server, turns = await several()
    turns.sources["b"].may_load.clear()
    waits = asyncio.create_task(server.chat(model="b"))
    await until(lambda: turns.sources["b"].num_loaded)
    for path in ("/health", "/health/generate"):
        answer = await server.http.get(path)
        assert (answer.status_code, answer.json()["models"]) == (200, {"a": "unloaded", "b": "loading"})
    assert turns.sources["a"].engine.num_probes == 0
    asked = await server.http.get("/is_sleeping")
    assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
    turns.sources["b"].may_load.set()
    await waits
    assert (await server.http.get("/health/generate")).status_code == 200
    assert (turns.sources["a"].engine.num_probes, turns.sources["b"].engine.num_probes) == (0, 1)


async def test_ollama_lists_all_and_says_which_runs(several):
    server, _ = await several()
    tags = (await server.http.get("/api/tags")).json()["models"]
    assert [each["name"] for each in tags] == ["a:latest", "b:latest"]
    loading = await server.post("/api/generate", {"model": "b"})  # Ollama's way to have a model loaded
    assert (loading.status_code, loading.json()["done_reason"]) == (200, "load")
    ps = (await server.http.get("/api/ps")).json()["models"]
    assert [each["name"] for each in ps] == ["b:latest"]
    shown = (await server.post("/api/show", {"model": "a"})).json()
    assert shown["model_info"]["general.basename"] == "a"


async def test_what_needs_a_tokenizer_only_lets_the_loaded_one_stay(several):
    server, turns = await several()
    await server.chat(model="b")
    for path, body in {
        "/tokenize": {"prompt": "Hi"},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
        "/v1/responses/input_tokens": {"input": "Hi"},
        "/api/show": {},
    }.items():
        assert (await server.post(path, {**body, "model": "a"})).status_code == 200
    assert (turns["a"].num_swaps, turns["b"].status) == (0, "loaded")


async def test_metrics_tell_them_apart(several):
    server, _ = await several("abc")
    await server.chat(model="b")
    lines = (await server.http.get("/metrics")).text.splitlines()

    def values(name: str) -> dict[str, float]:
        found = [line for line in lines if line.startswith(f"oneloop:{name}{{")]
        return {line.split('model_name="')[1][0]: float(line.rsplit(" ", 1)[1]) for line in found}

    assert values("model_loaded") == {"a": 0, "b": 1, "c": 0}
    assert values("model_swaps_total") == {"a": 0, "b": 1, "c": 0}
    assert values("num_requests_waiting_for_model") == {"a": 0, "b": 0, "c": 0}
    assert values("num_requests_running") == {"a": 0, "b": 0}, "what was never loaded has no engine"


async def test_sleep_and_wake_up_are_about_the_one_that_is_loaded(several):
    server, turns = await several()
    await server.chat(model="b")
    assert (await server.post("/sleep")).json() == {"is_sleeping": True}
    assert turns.sources["b"].engine.sleep_level == 1
    cards = (await server.http.get("/v1/models")).json()["data"]
    assert [card["status"]["value"] for card in cards] == ["unloaded", "sleeping"]
    assert (await server.post("/wake_up")).json() == {"is_sleeping": False}
    assert turns.sources["a"].engine.sleep_level == 1


async def test_a_request_in_the_background_keeps_its_model(several):
    server, turns = await several(paused=True)
    began = (await server.respond(model="a", background=True)).json()
    waits = asyncio.create_task(server.chat(model="b"))
    await until(lambda: turns["b"].waiting)
    one, other = turns.sources["a"].engine, turns.sources["b"].engine
    one.step(20)
    await other.until(lambda: bool(other.live))
    other.step(20)
    assert said(await waits) == "I am b"
    stored = (await server.http.get(f"/v1/responses/{began['id']}")).json()
    assert (stored["status"], "I am a" in json.dumps(stored["output"])) == ("completed", True)
