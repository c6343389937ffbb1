"""Input: strings, messages, calls, results and reasoning as the messages of a chat, and what is refused of them."""

from __future__ import annotations

import json

import pytest

from server.api.responses import input_items
from server.api.responses.messages import messages_of
from server.http.errors import InvalidRequest
from tests.server.responses.reading import prompt_of
from tests.server.test_refusals import error_of
from tests.server.tiny import tiny_tokenizer

SEEN = "{% if tools %}{% endif %}{% for m in messages %}{{ m | tojson }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
CALL = {"type": "function_call", "call_id": "call_1", "name": "time", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
IMAGE, FILE = {"type": "input_image", "file_id": "x"}, {"type": "input_file", "file_id": "x"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


async def seen(serve, **fields):
    """The messages, as a template reads them."""
    server = await serve(speaks=tiny_tokenizer(chat_template=SEEN), max_model_len=4096)
    lines = (await prompt_of(server, **fields)).splitlines()
    return [json.loads(line) for line in lines[:-1]]


def messages(*items, instructions=None):
    return messages_of(input_items.read(list(items)), instructions)


async def test_a_string_is_what_the_user_says(serve):
    assert await seen(serve, input="Hi") == [{"role": "user", "content": "Hi"}]


async def test_instructions_come_first(serve):
    found = await seen(serve, input="Hi", instructions="Be brief.")
    assert found == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


ONE_HEAD = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


async def test_instructions_and_system_messages_are_one_where_a_template_takes_no_second(serve):
    given = {
        "instructions": "Be brief.",
        "input": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    }
    strict = await serve(speaks=tiny_tokenizer(chat_template=ONE_HEAD))
    assert await prompt_of(strict, **given) == "<system>Be brief.\n\nBe kind.<user>Hi"
    assert error_of(await strict.respond(input=given["input"][::-1]), 400)["message"] == "system comes first"
    assert [message["content"] for message in await seen(serve, **given)] == ["Be brief.", "Be kind.", "Hi"]


@pytest.mark.parametrize("named", [True, False])
async def test_messages_need_not_say_that_they_are(serve, named):
    kind = {"type": "message"} if named else {}
    parts = [{"type": "input_text", "text": "He"}, {"type": "input_text", "text": "llo"}]
    given = [{**kind, "role": "developer", "content": "Be brief."}, {**kind, "role": "user", "content": parts}]
    found = await seen(serve, input=given)
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "He\nllo"},
    ]  # as chats join them


async def test_a_turn_of_the_model_is_one_message(serve):
    text = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    other = {**CALL, "call_id": "call_2"}
    given = [{"role": "user", "content": "When?"}, THOUGHT, said, CALL, other, RESULT, {**RESULT, "call_id": "call_2"}]
    user, assistant, *results = await seen(serve, input=given)
    assert user["role"] == "user"
    assert (assistant["role"], assistant["content"]) == ("assistant", "Let me see.")
    assert assistant["reasoning_content"] == "Hm."
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert [(r["role"], r["tool_call_id"], r["name"], r["content"]) for r in results] == [
        ("tool", "call_1", "time", "noon"), ("tool", "call_2", "time", "noon")
    ]  # fmt: skip


def test_messages_that_follow_each_other_stay_apart():
    first, second = messages({"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."})
    assert (first.content, second.content) == ("One.", "Two.")


def test_reasoning_without_its_words_is_its_summary():
    summary = [{"type": "summary_text", "text": "It thought."}]
    (turn,) = messages({"type": "reasoning", "summary": summary}, {"role": "assistant", "content": "Yes."})
    assert (turn.reasoning, turn.content) == ("It thought.", "Yes.")


def test_reasoning_of_a_next_turn_is_of_that_turn():
    one, two = messages({"role": "assistant", "content": "One."}, THOUGHT, {"role": "assistant", "content": "Two."})
    assert (one.reasoning, two.reasoning, two.content) == (None, "Hm.", "Two.")


def test_a_call_that_broke_off_is_not_made():
    (turn,) = messages({**CALL, "status": "incomplete"}, {"role": "assistant", "content": "<tool_call>"})
    assert (turn.tool_calls, turn.content) == ((), "<tool_call>")


def test_a_call_alone_has_no_content():
    (turn,) = messages(CALL)
    assert turn.content is None


def test_a_result_may_come_in_parts():
    parts = [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}]
    assert messages(CALL, {**RESULT, "output": parts})[1].content == ["no", "on"]


def test_what_is_listed_can_be_sent_again():
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    for item in input_items.read([{"role": "user", "content": "Hi"}, THOUGHT, CALL, RESULT, refusal]):
        listed = input_items.to_json(item)
        (again,) = input_items.read([listed])
        assert input_items.to_json(again) == listed
        assert listed["id"] == item.id


@pytest.mark.parametrize(
    ("item", "param", "code"),
    [
        ({"role": "user", "content": [IMAGE]}, "input[0].content[0].file_id", "unsupported_parameter"),
        ({"role": "user", "content": [FILE]}, "input[0].content[0].file_id", "unsupported_parameter"),
        ({"type": "computer_call", "id": "x"}, "input[0].type", "unsupported_parameter"),
        ({"type": "custom_tool_call", "id": "x", "name": "x", "input": ""}, "input[0].call_id", None),
        ({"type": "compaction", "encrypted_content": "gAAAA"}, "input[0].encrypted_content", None),
        ({**RESULT, "output": [FILE]}, "input[0].output[0].file_id", "unsupported_parameter"),
        ({**CALL, "caller": {"type": "program", "caller_id": "x"}}, "input[0].caller", "unsupported_parameter"),
        ({"role": "tool", "content": "Hi"}, "input[0].role", None),
        ({"role": "user"}, "input[0].content", None),
        ({"role": "user", "content": "Hi", "mood": "good"}, "input[0].mood", "unknown_parameter"),
        ({"type": "function_call", "name": "time", "arguments": "{}"}, "input[0].call_id", None),
        ({"type": 5}, "input[0].type", None),
        ({}, "input[0].role", None),
    ],
)  # fmt: skip
def test_an_item_that_cannot_be_served_is_refused_by_its_place(item, param, code):
    with pytest.raises(InvalidRequest) as caught:
        input_items.read([item])
    assert (caught.value.param, caught.value.code) == (param, code)


async def test_a_result_of_a_call_nobody_made_is_refused(serve):
    server = await serve()
    error = error_of(await server.respond(input=[RESULT]), 400)
    assert error["message"] == "No tool call found for function call output with call_id call_1."
    assert error_of(await server.respond(input=[{**CALL, "status": "incomplete"}, RESULT]), 400) == error


async def test_an_item_can_be_referred_to(serve):
    server = await serve("Hello there")
    first = (await server.respond()).json()
    given = [{"role": "user", "content": "And?"}, {"type": "item_reference", "id": first["output"][0]["id"]}]
    assert "Hello there" in await prompt_of(server, input=given)
    given[1]["id"] = "msg_x"
    assert error_of(await server.respond(input=given), 400)["param"] == "input[1].id"
