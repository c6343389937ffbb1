"""Truncation auto: the earliest turns go until the rest fits; disabled, the request is refused."""

from __future__ import annotations

import pytest

from server.api.responses import input_items
from server.api.responses.prepare import longest, shortenings
from tests.server.responses.reading import checked, prompt_of
from tests.server.test_refusals import error_of
from tests.server.tiny import tiny_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CALL = {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "noon"}


def turn(number):
    return [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": f"Answer {number}."}]


def test_whole_turns_go_and_system_messages_stay():
    given = [
        {"role": "developer", "content": "Be brief."},
        *turn(1),
        {"role": "user", "content": "Time?"},
        CALL,
        RESULT,
    ]
    items = input_items.read(given)
    assert shortenings(items) == [items, [items[0], *items[3:]]]


@pytest.mark.parametrize("num_turns", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("limit", range(20))
async def test_no_more_goes_than_has_to(num_turns, limit):
    items = input_items.read([item for number in range(num_turns) for item in turn(number)])

    async def fits(some):
        return len(some) <= limit

    found = await longest(items, fits)
    assert found == items[len(items) - max(2, min(limit // 2, num_turns) * 2) :]


async def test_a_conversation_that_is_too_long_is_shortened_or_refused(serve):
    server = await serve("Fine.", speaks=tiny_tokenizer(chat_template=TURNS), max_model_len=128)
    given = [item for number in range(10) for item in turn(number)] + [{"role": "user", "content": "And now?"}]
    assert error_of(await server.respond(input=given), 400)["code"] == "context_length_exceeded"
    fields = {"input": given, "instructions": "Be brief.", "max_output_tokens": 10, "truncation": "auto"}
    prompt = await prompt_of(server, **fields)
    assert prompt.startswith(
        "<system>Be brief.<user>Question 8?<assistant>Answer 8.<user>Question 9?<assistant>Answer 9.<user>And now?"
    )
    assert len(prompt) + 10 <= 128
    body = checked((await server.respond(**fields)).json())
    assert body["truncation"] == "auto"
    assert len((await server.http.get(f"/v1/responses/{body['id']}/input_items?limit=100")).json()["data"]) == 21


async def test_a_last_turn_that_is_too_long_is_refused(serve):
    server = await serve(max_model_len=64)
    error = error_of(
        await server.respond(input=[*turn(1), {"role": "user", "content": "x" * 100}], truncation="auto"), 400
    )
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
