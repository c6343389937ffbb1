"""Stored responses: retrieved, continued, listed, deleted, made in the background, streamed again, cancelled."""

from __future__ import annotations

import asyncio

import pytest

from runtime.api import FinishReason
from tests.server.responses.reading import checked, final, frames, prompt_of
from tests.server.test_refusals import error_of
from tests.server.test_tool_calls import ROOM, TWO
from tests.server.tiny import tiny_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TOOLS = [{"type": "function", "name": name} for name in ("get_weather", "time")]


def path_of(body, more=""):
    return f"/v1/responses/{body['id']}{more}"


async def speaking(serve, says="Fine.", **options):
    return await serve(says, speaks=tiny_tokenizer(chat_template=TURNS), **options)


async def background(server, **fields):
    response = await server.respond(background=True, **fields)
    assert response.status_code == 200, response.text
    return checked(response.json())


async def once(server, body, *statuses):
    """The response, once it has one of `statuses`."""
    while (now := checked((await server.http.get(path_of(body))).json()))["status"] not in statuses:
        pass
    return now


# --- retrieved and continued --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_there_afterwards_as_it_was(serve, stream):
    server = await serve()
    made = await server.respond(stream=stream)
    body = final(frames(made.text)) if stream else made.json()
    assert (await server.http.get(path_of(body))).json() == body


async def test_what_is_not_to_be_stored_is_not(serve):
    server = await serve()
    body = checked((await server.respond(store=False)).json())
    assert body["store"] is False
    assert "store false" in error_of(await server.http.get(path_of(body)), 404)["message"]


async def test_a_response_is_continued_without_its_instructions(serve):
    server = await speaking(serve)
    first = (await server.respond(input="How are you?", instructions="Be brief.")).json()
    second = (await server.respond(input="And now?", previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    prompt = await prompt_of(server, input="Still?", previous_response_id=second["id"], instructions="Be long.")
    said = "<user>How are you?<assistant>Fine.<user>And now?<assistant>Fine.<user>Still?<assistant>"
    assert prompt == f"<system>Be long.{said}"


async def test_a_call_is_answered_in_the_next_response(serve):
    server = await speaking(serve, TWO, max_model_len=ROOM, tool_parser="hermes")
    first = (await server.respond(tools=TOOLS)).json()
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"{item['name']}: fair"}
        for item in first["output"]
    ]
    prompt = await prompt_of(server, input=results, previous_response_id=first["id"])
    assert "get_weather: fair" in prompt
    assert "time: fair" in prompt


async def test_what_was_evicted_cannot_be_continued_and_says_so(serve):
    server = await serve(max_stored_responses=1)
    first, second = (await server.respond()).json(), (await server.respond()).json()
    error = error_of(await server.respond(previous_response_id=first["id"]), 404)
    assert error["code"] == "previous_response_not_found"
    assert "evicted" in error["message"]
    assert "evicted" in error_of(await server.http.get(path_of(first)), 404)["message"]
    assert (await server.respond(previous_response_id=second["id"], store=False)).status_code == 200


async def test_a_server_that_stores_nothing_answers_and_says_so(serve):
    server = await serve(max_stored_responses=0)
    body = checked((await server.respond()).json())
    assert body["store"] is False
    assert "--max-stored-responses 0" in error_of(await server.http.get(path_of(body)), 404)["message"]
    assert error_of(await server.respond(store=True), 400)["param"] == "store"
    assert error_of(await server.respond(background=True), 400)["param"] == "background"


async def test_a_response_belongs_to_the_key_that_made_it(serve):
    server = await serve(api_key=("one", "two"), admin_api_key="root")
    one, two, root = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "root"))
    body = (await server.post("/v1/responses", {"input": "Hi"}, headers=one)).json()
    for headers, status in ((one, 200), (two, 404), (root, 200)):
        assert (await server.http.get(path_of(body), headers=headers)).status_code == status
        again = {"input": "Hi", "previous_response_id": body["id"]}
        assert (await server.post("/v1/responses", again, headers=headers)).status_code == status
        assert (await server.http.get(path_of(body, "/input_items"), headers=headers)).status_code == status
    assert (await server.http.delete(path_of(body), headers=two)).status_code == 404
    assert (await server.http.get(path_of(body))).status_code == 401
    assert (await server.http.delete(path_of(body), headers=one)).status_code == 200


async def test_a_deleted_response_is_gone_and_what_continues_it_is_not(serve):
    server = await speaking(serve)
    first = (await server.respond(input="How are you?")).json()
    second = (await server.respond(input="And now?", previous_response_id=first["id"])).json()
    deleted = await server.http.delete(path_of(first))
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert "was deleted" in error_of(await server.http.get(path_of(first)), 404)["message"]
    assert error_of(await server.http.delete(path_of(first)), 404)["code"] == "response_not_found"
    assert "How are you?" in await prompt_of(server, previous_response_id=second["id"])


# --- input items --------------------------------------------------------------------------------------------------


async def test_input_items_are_listed_page_by_page(serve):
    server = await serve(max_model_len=ROOM)
    given = [{"role": "user", "content": f"number {number}"} for number in range(5)]
    first = (await server.respond(input=given)).json()
    body = (await server.respond(input="And?", previous_response_id=first["id"])).json()

    async def texts(**query):
        page = (await server.http.get(path_of(body, "/input_items"), params=query)).json()
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        return [item["content"][0]["text"] for item in page["data"]], page

    everything, page = await texts(order="asc")
    assert everything == [*(f"number {number}" for number in range(5)), "Hello there", "And?"]
    assert not page["has_more"]
    found, query = [], {"limit": 3}
    while True:
        part, page = await texts(**query)
        found += part
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert found == everything[::-1]


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")],
)
async def test_a_page_that_cannot_be_is_refused(serve, query, param):
    server = await serve()
    body = (await server.respond()).json()
    assert error_of(await server.http.get(path_of(body, "/input_items"), params=query), 400)["param"] == param


async def test_a_query_nobody_knows_is_named(serve):
    server = await serve()
    body = (await server.respond()).json()
    response = await server.http.get(path_of(body), params={"mood": "good", "include[]": "file_search_call.results"})
    assert response.headers["x-ignored-fields"] == "mood"
    assert error_of(await server.http.get(path_of(body), params={"include[]": "x"}), 400)["param"] == "include[0]"


# --- in the background --------------------------------------------------------------------------------------------


async def test_a_response_in_the_background_is_queued_then_made_then_there(serve):
    server = await serve(paused=True)
    body = await background(server)
    assert (body["status"], body["background"], body["output"]) == ("queued", True, [])
    server.engine.step(3)
    now = await once(server, body, "in_progress")
    assert now["output"][0]["content"][0]["text"] == "Hel"
    assert error_of(await server.respond(previous_response_id=body["id"]), 400)["param"] == "previous_response_id"
    server.engine.step(20)
    done = await once(server, body, "completed")
    assert done["output"][0]["content"][0]["text"] == "Hello there"
    assert (await server.http.post(path_of(body, "/cancel"))).json() == done


async def test_a_response_in_the_background_can_be_cancelled(serve):
    server = await serve(paused=True)
    body = await background(server)
    server.engine.step(3)
    cancelled = checked((await server.http.post(path_of(body, "/cancel"))).json())
    assert cancelled["status"] == "cancelled"
    assert [reason for _, reason in server.engine.ended] == [FinishReason.ABORT]
    assert (await server.http.post(path_of(body, "/cancel"))).json() == cancelled
    assert (await server.http.get(path_of(body))).json() == cancelled
    assert error_of(await server.respond(previous_response_id=body["id"]), 400)["param"] == "previous_response_id"


async def test_one_that_was_waited_for_cannot_be_cancelled(serve):
    server = await serve()
    body = (await server.respond()).json()
    assert "synchronous" in error_of(await server.http.post(path_of(body, "/cancel")), 400)["message"]
    assert error_of(await server.http.post("/v1/responses/resp_x/cancel"), 404)["code"] == "response_not_found"


async def test_deleting_one_that_is_made_ends_it(serve):
    server = await serve(paused=True)
    body = await background(server)
    assert (await server.http.delete(path_of(body))).status_code == 200
    assert [reason for _, reason in server.engine.ended] == [FinishReason.ABORT]
    assert "was deleted" in error_of(await server.http.get(path_of(body)), 404)["message"]


async def test_an_engine_that_fails_in_the_background_shows_when_the_response_is_retrieved(serve):
    server = await serve(paused=True)
    body = await background(server)
    server.engine.fail("the GPU is on fire")
    failed = await once(server, body, "failed")
    assert failed["error"]["code"] == "server_error"


async def test_a_stream_in_the_background_goes_on_without_its_reader_and_is_read_again(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi", background=True, stream=True)
    await stream.head()
    begun = frames((await stream.chunk()).decode())
    assert [event["type"] for event in begun] == ["response.created", "response.queued"]
    body = begun[0]["response"]
    stream.leave()
    server.engine.step(3)
    late = asyncio.create_task(server.http.get(path_of(body), params={"stream": True, "starting_after": 1}))
    server.engine.step(20)
    rest = frames((await late).text)
    assert final(rest, first=2)["status"] == "completed"
    assert rest[0]["type"] == "response.in_progress"
    whole = frames((await server.http.get(path_of(body), params={"stream": True})).text)
    assert whole == [*begun, *rest]
    assert final(whole) == await once(server, body, "completed")


async def test_a_stream_that_is_cancelled_ends_with_what_there_was(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi", background=True, stream=True)
    await stream.head()
    body = frames((await stream.chunk()).decode())[0]["response"]
    server.engine.step(3)
    events = frames((await stream.chunk()).decode())
    assert (await server.http.post(path_of(body, "/cancel"))).status_code == 200
    events += frames(b"".join(await stream.chunks()).decode())
    cancelled = final(events, first=2)
    assert cancelled["status"] == "cancelled"
    assert cancelled["output"][0]["status"] == "incomplete"
    assert cancelled["output"][0]["content"][0]["text"] == "Hel"


async def test_a_replay_pings_while_nothing_happens_and_has_the_headers_of_other_streams(serve):
    server = await serve(paused=True, ping_interval=0.01)
    background, whole = [
        await server.open_stream("/v1/responses", input="Hi", stream=True, **more)
        for more in ({"background": True}, {})
    ]
    heads = [sorted((await stream.head()).lower().split("\r\n")) for stream in (background, whole)]
    differing = {line.partition(":")[0] for line in set(heads[0]) ^ set(heads[1])}
    assert differing <= {"connection", "x-request-id", "date"}
    assert b"response.queued" in await background.chunk()
    assert await background.chunk() == b": ping\n\n"
    background.leave()
    whole.leave()


async def test_a_replay_leaves_nothing_running_behind_its_reader(serve):
    """sse-starlette alone would go on looking for a shutdown twice a second."""
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi", background=True, stream=True)
    await stream.head()
    body = frames((await stream.chunk()).decode())[0]["response"]
    assert not [task for task in asyncio.all_tasks() if "_shutdown_watcher" in repr(task.get_coro())]
    stream.leave()
    server.engine.step(30)
    assert (await once(server, body, "completed"))["status"] == "completed"


async def test_only_what_was_streamed_in_the_background_is_streamed_again(serve):
    server = await serve()
    body = (await server.respond()).json()
    assert error_of(await server.http.get(path_of(body), params={"stream": True}), 400)["param"] == "stream"
    query = {"starting_after": 3}
    assert error_of(await server.http.get(path_of(body), params=query), 400)["param"] == "starting_after"
