"""POST /v1/responses: what a response says, whole and streamed, in the shapes of the official client."""

from __future__ import annotations

import json

import pytest

from runtime.api import FinishReason, QueueFull
from tests.server.responses.reading import both, checked, final, frames, prompt_of
from tests.server.test_reasoning_chats import SAYS, thinker
from tests.server.test_refusals import error_of
from tests.server.test_tool_calls import ROOM, TWO
from tests.server.text.tool_samples import PARIS
from tests.server.tiny import EOS, tiny_tokenizer

WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
TIME = {"type": "function", "name": "time", "description": "What time it is"}
LOGPROBS = "message.output_text.logprobs"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def kinds(body):
    return [item["type"] for item in body["output"]]


def text_of(item):
    return "".join(part["text"] for part in item["content"])


# --- what comes out -----------------------------------------------------------------------------------------------


async def test_a_text_is_one_message(serve):
    server = await serve("Hello there")
    body = await both(server, model="tiny")
    assert kinds(body) == ["message"]
    assert text_of(body["output"][0]) == "Hello there"
    assert body["status"] == body["output"][0]["status"] == "completed"
    assert body["completed_at"] >= body["created_at"]
    assert body["usage"]["output_tokens"] == len("Hello there") + 1
    assert body["usage"]["input_tokens"] == len(server.engine.submitted[-1].prompt_ids)


async def test_an_answer_without_a_word_is_a_message_too(serve):
    server = await serve("")
    body = await both(server)
    assert [text_of(item) for item in body["output"]] == [""]


async def test_reasoning_is_an_item_before_the_message(serve):
    server = await serve(SAYS, speaks=thinker())
    body = await both(server)
    assert kinds(body) == ["reasoning", "message"]
    assert [text_of(item) for item in body["output"]] == ["Hm.", "Yes."]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 1 + len("\nHm.\n</think>")


async def test_reasoning_cut_off_is_all_there_is(serve):
    server = await serve(SAYS, speaks=thinker())
    body = await both(server, max_output_tokens=10)
    assert kinds(body) == ["reasoning"]
    assert body["output"][0]["status"] == body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None


async def test_reasoning_that_ends_without_an_answer_is_an_item_and_complete(serve):
    server = await serve("<think>\nHm. So", speaks=thinker())
    body = await both(server)
    assert [(item["type"], item["status"], text_of(item)) for item in body["output"]] == [
        ("reasoning", "completed", "Hm. So")
    ]
    assert (body["status"], body["incomplete_details"]) == ("completed", None)


async def test_calls_are_items_in_the_order_they_were_written(serve):
    server = await serve(f"Let me see.{TWO}", max_model_len=ROOM)
    body = await both(server, tools=[WEATHER, TIME])
    assert kinds(body) == ["message", "function_call", "function_call"]
    assert [item["name"] for item in body["output"][1:]] == ["get_weather", "time"]
    assert json.loads(body["output"][1]["arguments"]) == PARIS
    assert len({item["call_id"] for item in body["output"][1:]}) == 2
    assert body["status"] == "completed"


async def test_one_call_is_enough_where_calls_are_not_to_be_parallel(serve):
    server = await serve(TWO, max_model_len=ROOM)
    body = await both(server, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert kinds(body) == ["function_call"]


async def test_a_call_that_breaks_off_stays_incomplete_and_becomes_text(serve):
    server = await serve(TWO, max_model_len=ROOM)
    body = await both(server, tools=[WEATHER, TIME], max_output_tokens=70)
    assert kinds(body) == ["function_call", "message"]
    assert body["output"][0]["status"] == "incomplete"
    assert text_of(body["output"][1]) == TWO[:70]
    assert body["status"] == "incomplete"


async def test_cached_tokens_are_counted(serve):
    server = await serve()
    server.engine.num_cached_tokens = 3
    assert (await both(server))["usage"]["input_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize("says", ["Hello", SAYS, f"<think>a</think>Well.{TWO}"])
async def test_log_probabilities_stand_beside_the_text_of_their_tokens(serve, says):
    server = await serve(says, speaks=thinker("<assistant>{{ enable_thinking }}<think></think>"), max_model_len=ROOM)
    body = await both(server, include=[LOGPROBS], top_logprobs=2, tools=[WEATHER])
    for item in body["output"]:
        if item["type"] == "message":
            part = item["content"][0]
            tokens = "".join(entry["token"] for entry in part["logprobs"])
            assert tokens.strip() == part["text"]
            assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


async def test_a_slow_reader_gets_every_log_probability_at_its_place(serve):
    server = await serve("Hello", paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi", stream=True, include=[LOGPROBS])
    await server.engine.until(lambda: server.engine.live)
    server.engine.step(6)
    await stream.head()
    events = frames(b"".join(await stream.chunks()).decode())
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], [entry["token"] for entry in event["logprobs"]]) for event in deltas] == [
        (letter, [letter]) for letter in "Hello"
    ]
    final(events)


async def test_the_request_is_repeated_in_the_response(serve):
    server = await serve(max_model_len=ROOM)
    echoed = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "max_output_tokens": 50, "max_tool_calls": 2,
        "temperature": 0.5, "top_p": 0.25, "parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s",
        "truncation": "disabled", "top_logprobs": 1, "tool_choice": "none",
    }  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    response = await server.respond(**echoed, tools=[TIME], include=[LOGPROBS], text=text, reasoning={"effort": "low"})
    body = checked(response.json())
    assert {name: body[name] for name in echoed} == echoed
    assert body["tools"] == [{**TIME, "parameters": None, "strict": False}]
    assert body["text"]["format"] == {**text["format"], "description": None}
    assert body["reasoning"]["effort"] == "low"
    assert body["store"] is True


async def test_sampling_fields_reach_the_engine(serve):
    server = await serve()
    await both(server, temperature=0.5, top_p=0.5, top_k=7, min_p=0.1, seed=3, max_output_tokens=4, stop=["zz"])
    params = server.engine.submitted[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.5, 7, 0.1)
    assert (params.seed, params.max_tokens) == (3, 4)


@pytest.mark.parametrize(
    "format", [{"type": "json_object"}, {"type": "json_schema", "name": "n", "schema": {"type": "object"}}]
)
async def test_a_format_holds_the_engine_to_it(serve, format):
    server = await serve("{}")
    assert (await server.respond(text={"format": format})).status_code == 200
    assert server.engine.submitted[-1].params.matchers
    await server.respond(text={"format": {"type": "text"}})
    assert not server.engine.submitted[-1].params.matchers


# --- tools --------------------------------------------------------------------------------------------------------


async def test_tools_reach_the_template_and_none_of_them_with_tool_choice_none(serve):
    speaks = tiny_tokenizer(chat_template="{{ tools }}" + TURNS)
    server = await serve(speaks=speaks, tool_parser="hermes", max_model_len=ROOM)
    assert "What time it is" in await prompt_of(server, tools=[TIME])
    assert "What time it is" not in await prompt_of(server, tools=[TIME], tool_choice="none")


async def test_the_template_sees_allowed_tools_only(serve):
    speaks = tiny_tokenizer(chat_template="{{ tools }}" + TURNS)
    server = await serve(speaks=speaks, tool_parser="hermes", max_model_len=ROOM)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    prompt = await prompt_of(server, tools=[TIME, WEATHER], tool_choice=allowed)
    assert "What time it is" in prompt
    assert "get_weather" not in prompt


# --- what ends it -------------------------------------------------------------------------------------------------


async def test_leaving_a_stream_ends_the_work_behind_it(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi", stream=True)
    await stream.head()
    first = frames((await stream.chunk()).decode())
    assert [event["type"] for event in first] == ["response.created", "response.in_progress"]
    stream.leave()
    await server.engine.until(lambda: server.engine.ended)
    assert server.engine.ended[0][1] == FinishReason.ABORT
    error = error_of(await server.http.get(f"/v1/responses/{first[0]['response']['id']}"), 404)
    assert "ended before it was complete" in error["message"]


async def test_leaving_a_whole_response_ends_the_work_behind_it(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi")
    await server.engine.until(lambda: server.engine.live)
    stream.leave()
    await server.engine.until(lambda: server.engine.ended)
    assert server.engine.ended[0][1] == FinishReason.ABORT


async def test_a_failing_engine_ends_a_stream_with_a_failed_response(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi", stream=True)
    await stream.head()
    await server.engine.until(lambda: server.engine.live)
    server.engine.step(3)
    server.engine.fail("the GPU is on fire")
    body = final(frames(b"".join(await stream.chunks()).decode()))
    assert body["status"] == "failed"
    assert body["error"]["code"] == "server_error"
    assert "fire" not in body["error"]["message"]
    stored = await server.http.get(f"/v1/responses/{body['id']}")
    assert stored.json() == body


async def test_a_failing_engine_is_a_500_for_a_whole_response(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi")
    await server.engine.until(lambda: server.engine.live)
    server.engine.fail("the GPU is on fire")
    assert " 500 " in await stream.head()


async def test_a_server_that_shuts_down_says_so_in_the_stream(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/responses", input="Hi", stream=True)
    await stream.head()
    await server.engine.until(lambda: server.engine.live)
    await server.engine.drain(0)
    body = final(frames(b"".join(await stream.chunks()).decode()))
    assert body["status"] == "failed"
    assert "The server ended the request" in body["error"]["message"]


async def test_a_full_queue_is_a_429_streamed_or_not(serve):
    server = await serve()
    server.engine.refuse = QueueFull(256, 256)
    for fields in ({}, {"stream": True}, {"background": True}, {"background": True, "stream": True}):
        assert error_of(await server.respond(**fields), 429)["code"] == "rate_limit_exceeded"


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", None),
        ({"input": 5}, "input", None),
        ({"model": "other"}, "model", "model_not_found"),
        ({"temperature": 3}, "temperature", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"max_output_tokens": 100_000}, "input", "context_length_exceeded"),
        ({"metadata": {"a": 5}}, "metadata", None),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", None),
        ({"include": ["everything"]}, "include[0]", None),
        ({"background": True, "store": False}, "background", None),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", None),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type", "unsupported_parameter"),
        (
            {"tools": [{**TIME, "allowed_callers": ["programmatic"]}]},
            "tools[0].allowed_callers",
            "unsupported_parameter",
        ),
        ({"tools": [TIME, TIME]}, "tools", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", None),
        ({"tools": [TIME], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "unsupported_parameter"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}, "text.format.schema", None),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", None),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(serve, fields, param, code):
    server = await serve()
    response = await server.respond(**fields)
    error = error_of(response, 404 if code and code.endswith("_found") else 400)
    assert error["code"] == code
    assert param is None or error["param"] == param
    assert not server.engine.submitted


async def test_fields_nobody_knows_are_named_or_refused(serve):
    server = await serve()
    response = await server.respond(mood="good", reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    assert response.status_code == 200
    named = "mood, reasoning.summary"
    assert response.headers["x-ignored-fields"] == named
    strict = await serve(strict_fields=True)
    assert error_of(await strict.respond(mood="good"), 400)["code"] == "unknown_parameter"
    assert error_of(await strict.respond(reasoning={"summary": "auto"}), 400)["param"] == "reasoning.summary"


async def test_effort_nobody_listens_to_is_named_as_ignored(serve):
    server = await serve()
    response = await server.respond(reasoning={"effort": "low"})
    assert response.headers["x-ignored-fields"] == "reasoning.effort"


async def test_effort_reaches_a_template_that_listens(serve):
    server = await serve(speaks=tiny_tokenizer(chat_template=TURNS + "{{ reasoning_effort }}"))
    assert (await prompt_of(server, reasoning={"effort": "high"})).endswith("high")


async def test_a_stop_token_of_the_request_ends_it(serve):
    server = await serve(script=lambda request: [*b"abc", EOS])
    body = await both(server, stop_token_ids=[EOS])
    assert body["status"] == "completed"
