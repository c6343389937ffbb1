"""/v1/messages: answers whole and streamed, event by event, by scripted tokens and as the official client reads them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from server.api.anthropic import api_types as answers
from server.api.anthropic.api_types import SIGNATURE
from tests.server.conftest import Running
from tests.server.test_reasoning_chats import BEGUN, SAYS, THINKING, thinker
from tests.server.test_tool_calls import HERMES, ROOM, TWO, speaker
from tests.server.text.tool_samples import CALL, PARIS, SAMPLES, Sample
from tests.server.text.tool_samples import TOOLS as OPENAIS_TOOLS

MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
BASE = {"model": "tiny", "max_tokens": 400, "messages": HI}
TOOLS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in OPENAIS_TOOLS]
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.tool_parser}-{at}" for at, s in enumerate(SAMPLES)])


def is_whole(body: Any, kind: Any) -> bool:
    return msgspec.to_builtins(msgspec.convert(body, kind)) == body


async def ask(server: Running, **fields: Any) -> dict[str, Any]:
    response = await server.post(MESSAGES, {**BASE, **fields})
    assert response.status_code == 200, response.text
    assert is_whole(response.json(), answers.AnthropicMessage)
    return response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    found = text.split("\n\n")
    assert found.pop() == ""
    events = []
    for each in found:
        if each.startswith(":"):
            continue
        name, data = each.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert is_whole(event, answers.MessageEvent)
        events.append(event)
    return events


async def stream(server: Running, **fields: Any) -> list[dict[str, Any]]:
    response = await server.post(MESSAGES, {**BASE, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.text)


def together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to, checked against the rules of streams."""
    start, *middle, delta, last = events
    assert (start["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    texts: list[str] = []
    for place, event in enumerate(middle):
        if event["type"] == "ping":
            assert place == 1
            continue
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"]) == len(texts)
                message["content"].append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(texts) - 1
                delta_type, block = event["delta"]["type"], message["content"][-1]
                assert delta_type in {
                    "text": ["text_delta"], "tool_use": ["input_json_delta"],
                    "thinking": ["thinking_delta", "signature_delta"],
                }[block["type"]]  # fmt: skip
                if delta_type == "signature_delta":
                    block["signature"] = event["delta"]["signature"]
                else:
                    assert not block.get("signature")
                    texts[-1] += event["delta"][
                        delta_type.replace("input_json_delta", "partial_json").removesuffix("_delta")
                    ]
            case "content_block_stop":
                assert event["index"] == len(texts) - 1
    assert sum(event["type"] == "content_block_stop" for event in middle) == len(texts)
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(text)
        else:
            assert block[block["type"]] == ""
            block[block["type"]] = text
    message |= delta["delta"]
    message["usage"] |= delta["usage"]
    return message


async def both(server: Running, **fields: Any) -> dict[str, Any]:
    """A whole answer, with which a stream of the same has to agree in all but ids."""
    whole = await ask(server, **fields)
    streamed = together(await stream(server, **fields))
    assert without_ids(whole) == without_ids(streamed)
    return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": None, "content": content}


# --- text ---------------------------------------------------------------------------------------------------------


async def test_an_answer_is_a_message(serve):
    server = await serve("Hello there", served_model_name=("tiny", "claude"))
    message = await both(server, model="claude", system="Be brief.")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(server.engine.submitted[0].prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len("Hello there") + 1,
            "service_tier": "standard",
        },
    }


async def test_the_events_of_a_stream_come_in_anthropics_order(serve):
    server = await serve("Hé")
    events = await stream(server)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["delta"]["text"] for event in events if "delta" in event and "text" in event["delta"]] == ["H", "é"]
    assert events[0]["message"]["usage"]["input_tokens"] == len(server.engine.submitted[0].prompt_ids)
    assert events[-2]["usage"]["output_tokens"] == len("Hé".encode()) + 1


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"stop_sequences": ["END", "the"]}, "stop_sequence", "the", "Hello "),
        ({"max_tokens": 5}, "max_tokens", None, "Hello"),
        ({"max_tokens": 100_000}, "end_turn", None, "Hello there"),
    ],
)
async def test_it_says_why_it_stopped(serve, fields, reason, sequence, text):
    server = await serve("Hello there")
    message = await both(server, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"] == [{"type": "text", "text": text}]


async def test_max_tokens_may_be_more_than_the_context_has_left(serve):
    server = await serve("Hello there", max_model_len=30)
    message = await both(server, max_tokens=100_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    used = message["usage"]
    assert used["input_tokens"] + used["output_tokens"] == 30


async def test_nothing_is_generated_where_nothing_is_wanted(serve):
    server = await serve("Hello there")
    message = await both(server, max_tokens=0)
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0


async def test_an_empty_answer_has_no_blocks(serve):
    server = await serve("")
    assert (await both(server))["content"] == []


async def test_what_came_out_of_the_cache_is_not_counted_twice(serve):
    server = await serve("Hello")
    server.engine.num_cached_tokens = 16
    used = (await both(server))["usage"]
    assert used["cache_read_input_tokens"] == 16
    assert used["input_tokens"] == len(server.engine.submitted[0].prompt_ids) - 16


async def test_a_begun_answer_goes_on(serve):
    server = await serve(" 42")
    await ask(server, messages=[*HI, {"role": "assistant", "content": "It is"}])
    (request,) = server.engine.submitted
    assert server.tokenizer.decode(request.prompt_ids, skip_special_tokens=False).endswith("assistant\nIt is")


async def test_a_long_history_is_no_different(serve):
    server = await serve("Hello", max_model_len=ROOM)
    turns = [*HI, {"role": "assistant", "content": "Yes?"}]
    await ask(server, messages=[*turns * 60, *HI])
    prompt = server.tokenizer.decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False)
    assert prompt.count("Yes?") == 60
    response = await server.post(MESSAGES, {**BASE, "messages": [*turns * 60, {"role": "user", "content": ""}]})
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_sampling_reaches_the_engine(serve):
    server = await serve()
    await ask(server, temperature=0.5, top_p=0.9, top_k=5, metadata={"user_id": "me"}, service_tier="auto")
    params = server.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 5, 400)


async def test_the_count_is_what_an_answer_is_charged(serve):
    server = await serve("Hello", max_model_len=ROOM)
    for fields in ({}, {"system": "Be brief."}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": {"type": "none"}}):
        charged = (await ask(server, **fields))["usage"]["input_tokens"]
        body = {"model": "tiny", "messages": HI, **fields}
        response = await server.post(f"{MESSAGES}/count_tokens", body)
        assert response.json() == {"input_tokens": charged}
        assert is_whole(response.json(), answers.InputTokens)


async def test_ids_are_in_the_headers_and_the_headers_of_clients_do_no_harm(serve):
    server = await serve()
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-request-id": "mine"}
    response = await server.http.post(f"{MESSAGES}?beta=true", json=BASE, headers=headers)
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "msg_mine"
    assert "request-id" not in (await server.chat()).headers


# --- tools --------------------------------------------------------------------------------------------------------


def content_of(sample: Sample) -> list[dict[str, Any]]:
    thought = [{"type": "thinking", "thinking": sample.reasoning, "signature": SIGNATURE}] if sample.reasoning else []
    text = [{"type": "text", "text": sample.text}] if sample.text else []
    calls = [{"type": "tool_use", "name": name, "input": input} for name, input in sample.calls]
    return sorted([*thought, *text, *calls], key=str)


@every_sample
async def test_every_tool_parser_comes_out_in_anthropics_shape_whole_and_streamed(serve, sample: Sample):
    server = await serve(
        sample.written,
        speaks=speaker(sample.tool_parser, special=True),
        tool_parser=sample.tool_parser,
        max_model_len=ROOM,
    )
    message = await both(server, tools=TOOLS, max_tokens=2000)
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    assert all(block["id"].startswith("toolu_") for block in uses)
    assert len({block["id"] for block in uses}) == len(uses)
    assert sorted(without_ids(message)["content"], key=str) == content_of(sample)
    assert message["stop_reason"] == ("tool_use" if sample.calls else "end_turn")


async def test_a_call_cut_off_comes_back_as_text_and_nobody_is_asked_to_make_it(serve):
    server = await serve(HERMES, max_model_len=ROOM)
    written = HERMES.encode()[:80].decode()
    whole = await ask(server, tools=TOOLS, max_tokens=80)
    assert whole["content"] == [{"type": "text", "text": written.replace("\n", "", 1)}]
    events = await stream(server, tools=TOOLS, max_tokens=80)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["text", "tool_use", "text"]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(piece.get("partial_json", "") for piece in pieces) in CALL
    assert pieces[-1]["text"] == written.partition("\n")[2]
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_one_call_at_most_where_several_are_not_wanted(serve):
    server = await serve(TWO, max_model_len=ROOM)
    message = await both(server, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["input"] for block in message["content"]] == [PARIS]


# --- thinking -----------------------------------------------------------------------------------------------------


async def test_thinking_is_a_block_of_its_own_and_counted(serve):
    server = await serve(SAYS, speaks=thinker())
    message = await both(server, thinking={"type": "adaptive"})
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
        {"type": "text", "text": "Yes."},
    ]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > len("Hm.")


@pytest.mark.parametrize(
    ("template", "thinking", "held"),
    [
        (THINKING, {"type": "enabled", "budget_tokens": 1024}, 1),
        (THINKING, {"type": "adaptive"}, 0),
        (THINKING, {"type": "disabled"}, 0),
        (BEGUN, {"type": "disabled"}, 1),
    ],
)
async def test_a_budget_holds_thinking_that_no_switch_does(serve, template, thinking, held):
    server = await serve(SAYS, speaks=thinker(template), max_model_len=ROOM)
    await ask(server, thinking=thinking, max_tokens=2000)
    assert len(server.engine.submitted[0].params.matchers) == held


async def test_thinking_that_ends_without_an_answer_is_all_there_is(serve):
    server = await serve("<think>\nHm. So", speaks=thinker())
    message = await both(server, thinking={"type": "adaptive"})
    assert message["content"] == [{"type": "thinking", "thinking": "Hm. So", "signature": SIGNATURE}]
    assert message["stop_reason"] == "end_turn"


async def test_thinking_may_be_left_out_and_keeps_its_place(serve):
    server = await serve(SAYS, speaks=thinker())
    message = await both(server, thinking={"type": "adaptive", "display": "omitted"})
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}


async def test_thinking_switched_off_is_not_shown(serve):
    server = await serve(SAYS, speaks=thinker(THINKING))
    message = await both(server, thinking={"type": "disabled"})
    assert message["content"] == [{"type": "text", "text": "Yes."}]
    prompt = server.tokenizer.decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")


async def test_a_model_that_does_not_think_says_so(serve):
    server = await serve()
    for fields, named in (
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ):
        response = await server.post(MESSAGES, {**BASE, **fields})
        assert response.headers["x-ignored-fields"] == named
        assert response.json()["content"] == [{"type": "text", "text": "Hello there"}]
    strict = await serve(strict_fields=True)
    response = await strict.post(MESSAGES, {**BASE, "thinking": {"type": "adaptive"}})
    assert response.status_code == 400
    assert "thinking" in response.json()["error"]["message"]


# --- departures and failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_ends_its_request(serve, streamed):
    server = await serve(paused=True)
    answer = await server.open_stream(MESSAGES, **BASE, stream=streamed)
    await server.engine.until(lambda: bool(server.engine.live))
    if streamed:
        server.engine.step()
        await answer.head()
        assert b"message_start" in await answer.chunk()
    answer.leave()
    await server.engine.until(lambda: bool(server.engine.ended))
    assert [str(reason) for _, reason in server.engine.ended] == ["abort"]


async def test_a_failure_in_a_stream_is_an_event_that_tells_nothing_of_the_inside(serve):
    server = await serve(paused=True)
    answer = await server.open_stream(MESSAGES, **BASE, stream=True)
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step()
    await answer.head()
    server.engine.fail("cuda fell over")
    body = b"".join(await answer.chunks()).decode()
    assert "cuda" not in body
    last = events_of(body)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] in last["error"]["message"]


async def test_the_end_of_the_server_is_an_error_and_not_an_answer(serve):
    server = await serve(paused=True)
    answer = await server.open_stream(MESSAGES, **BASE, stream=True)
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step()
    await answer.head()
    await server.engine.drain(0)
    events = events_of(b"".join(await answer.chunks()).decode())
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "overloaded_error"


# --- the official client ------------------------------------------------------------------------------------------


async def test_the_official_client_reads_text_whole_and_streamed(serve):
    server = await serve("Hello there")
    async with server.anthropic() as client:
        whole = await client.messages.create(**BASE, stop_sequences=["re"])
        assert (whole.content[0].text, whole.stop_reason, whole.stop_sequence) == ("Hello the", "stop_sequence", "re")
        assert whole._request_id
        async with client.messages.stream(**BASE, stop_sequences=["re"]) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello the"
            streamed = await stream.get_final_message()
        assert (streamed.content[0].text, streamed.usage, streamed.stop_reason, streamed.stop_sequence) == (
            "Hello the", whole.usage, whole.stop_reason, whole.stop_sequence,
        )  # fmt: skip
        count = await client.messages.count_tokens(model="tiny", messages=HI)
        assert count.input_tokens == whole.usage.input_tokens


@every_sample
async def test_the_official_client_reads_every_tool_parser_and_may_send_it_back(serve, sample: Sample):
    server = await serve(
        sample.written,
        speaks=speaker(sample.tool_parser, special=True),
        tool_parser=sample.tool_parser,
        max_model_len=ROOM,
    )
    ask = {**BASE, "max_tokens": 2000, "tools": TOOLS}
    async with server.anthropic() as client:
        async with client.messages.stream(**ask) as stream:
            answer = await stream.get_final_message()
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert [(block.name, block.input) for block in uses] == sample.calls
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "ok"} for block in uses]
        turn = {"role": "user", "content": results or "Go on."}
        again = await client.messages.create(**{**ask, "messages": [*HI, answer.to_param(), turn]})
        assert [block.type for block in again.content] == [block.type for block in answer.content]


async def test_the_official_client_reads_thinking(serve):
    server = await serve("Hm.\n</think>\n\nYes.", speaks=thinker(BEGUN))
    async with (
        server.anthropic() as client,
        client.messages.stream(**BASE, thinking={"type": "adaptive"}) as stream,
    ):
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Hm."


async def test_a_gap_between_tokens_is_no_gap_to_the_official_client(serve):
    server = await serve("Hello", paused=True, ping_interval=0.01)
    async with server.anthropic() as client, client.messages.stream(**BASE) as stream:
        await server.engine.until(lambda: bool(server.engine.live))
        server.engine.step(len("Hello") + 1)
        assert (await stream.get_final_message()).content[0].text == "Hello"
    assert server.engine.ended[0][1] == "stop"
