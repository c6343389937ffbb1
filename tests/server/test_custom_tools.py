"""Custom tools in chats: called with a text, which a grammar may hold, whole and streamed, as OpenAI has them."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import MESSAGES
from tests.server.responses.test_response_tools import PATCH_RULES, PATCHED, custom_call
from tests.server.test_forced_calls import CALL, F, check_forms
from tests.server.test_refusals import error_of
from tests.server.test_tool_calls import CHAT, ROOM
from tests.server.tiny import EOS

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Changes files"}}
TO_P = {"name": "p", "input": ""}
NAMED = {"type": "custom", "custom": {"name": "patch"}}
PATCH_CALL = custom_call("patch", PATCHED)
OTHER_CALL = custom_call("patch", "print('hi')")


def held(definition: str, syntax: str = "lark") -> dict:
    grammar = {"type": "grammar", "grammar": {"definition": definition, "syntax": syntax}}
    return {"type": "custom", "custom": {**PATCH["custom"], "format": grammar}}


async def streamed(server, **fields) -> tuple[list[dict], list[dict]]:
    """The calls that the deltas of choice 0 add up to, and the deltas."""
    calls: list[dict] = []
    deltas = []
    for event in await server.events(CHAT, messages=MESSAGES, **fields):
        for delta in event["choices"][0]["delta"].get("tool_calls", []):
            deltas.append(delta)
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({"id": delta["id"], "type": delta["type"], delta["type"]: delta[delta["type"]]})
            else:
                call = calls[delta["index"]]
                (name,) = delta.keys() - {"index"}
                (part,) = delta[name].keys()
                call[name][part] += delta[name][part]
    return calls, deltas


def without_ids(calls: list[dict]) -> list[dict]:
    return [{key: value for key, value in call.items() if key != "id"} for call in calls]


async def both(server, **fields) -> list[dict]:
    """The calls of a whole answer, which those of a stream have to equal."""
    choice = (await server.chat(**fields)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    whole = choice["message"]["tool_calls"]
    assert without_ids((await streamed(server, **fields))[0]) == without_ids(whole)
    return whole


async def test_a_custom_tool_is_called_with_a_text_and_its_result_read(serve):
    server = await serve(PATCH_CALL, max_model_len=ROOM)
    (call,) = await both(server, tools=[PATCH])
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": PATCHED})
    answered = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "It is done"},
    ]
    assert (await server.chat(tools=[PATCH], messages=answered)).status_code == 200
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
    assert json.dumps({"input": PATCHED}) in prompt
    assert "It is done" in prompt


async def test_functions_and_custom_tools_are_called_side_by_side(serve):
    server = await serve(f"{CALL}\n{PATCH_CALL}\n{CALL}", max_model_len=ROOM)
    calls = await both(server, tools=[F, PATCH])
    assert [call["type"] for call in calls] == ["function", "custom", "function"]
    assert calls[1]["custom"]["input"] == PATCHED
    assert json.loads(calls[2]["function"]["arguments"]) == {"a": 1, "b": "x"}


async def test_the_official_client_reads_the_calls(serve):
    server = await serve(PATCH_CALL, max_model_len=ROOM)
    async with server.openai() as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[PATCH])
        (call,) = answer.choices[0].message.tool_calls
        assert call.type == "custom"
        assert call.custom.input == PATCHED
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[PATCH], stream=True)
        pieces = [piece async for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].type == "custom"
    assert len(pieces) > 5
    assert "".join(piece.custom["input"] for piece in pieces) == PATCHED


@pytest.mark.parametrize(
    ("tool", "taken", "refused"),
    [
        (held(PATCH_RULES), PATCH_CALL, OTHER_CALL),
        (held("[a-z]+\n[0-9]{2}", "regex"), custom_call("patch", "ab\n12"), custom_call("patch", "ab\n1")),
    ],
)
async def test_a_grammar_holds_the_text(serve, tool, taken, refused):
    server = await serve(taken, max_model_len=ROOM)
    await check_forms(server, {"tools": [tool]}, [taken, "Only a text"], [refused])
    for choice in (NAMED, "required"):
        await check_forms(server, {"tools": [tool], "tool_choice": choice}, [taken], [refused, "Only a text"])
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
    assert "The input keeps to" in prompt


@pytest.mark.parametrize("format", [None, {"type": "text"}])
async def test_a_text_that_nothing_holds_may_be_any(serve, format):
    tool = {"type": "custom", "custom": {**PATCH["custom"], "format": format}}
    server = await serve(PATCH_CALL, max_model_len=ROOM)
    assert (await both(server, tools=[tool]))[0]["custom"]["input"] == PATCHED
    assert server.engine.submitted[-1].params.matchers == ()


async def test_arguments_of_another_form_are_the_text_as_they_are(serve):
    written = '{"code": "1"}'
    call = f'<tool_call>\n{{"name": "patch", "arguments": {written}}}\n</tool_call>'
    server = await serve(f"{call}\n{call}", max_model_len=ROOM)
    calls = await both(server, tools=[PATCH])
    assert [call["custom"]["input"] for call in calls] == [written, written]


async def test_a_call_that_the_limit_cut_off_stays_one_as_far_as_it_goes(serve):
    server = await serve(PATCH_CALL, max_model_len=ROOM)
    limit = len(server.tokenizer.encode(PATCH_CALL)) - 60
    whole = (await server.chat(tools=[PATCH], max_tokens=limit)).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    (call,) = whole["message"]["tool_calls"]
    assert call["custom"]["input"]
    assert PATCHED.startswith(call["custom"]["input"])
    assert without_ids((await streamed(server, tools=[PATCH], max_tokens=limit))[0]) == without_ids([call])


async def test_several_answers_are_read_apart(serve):
    texts = iter([custom_call("patch", "first"), custom_call("patch", "second, longer")])
    server = await serve(max_model_len=ROOM)
    server.engine.script = lambda request: [*server.tokenizer.encode(next(texts)), EOS]
    events = await server.events(CHAT, messages=MESSAGES, tools=[PATCH], n=2)
    inputs = ["", ""]
    for choice in (choice for event in events for choice in event["choices"]):
        inputs[choice["index"]] += "".join(
            delta["custom"]["input"] for delta in choice["delta"].get("tool_calls", []) if "custom" in delta
        )
    assert inputs == ["first", "second, longer"]


async def test_a_choice_may_allow_some_of_the_tools(serve):
    server = await serve(PATCH_CALL, max_model_len=ROOM)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    await check_forms(server, {"tools": [F, PATCH], "tool_choice": allowed}, [PATCH_CALL], [CALL, "Hi"])
    functions = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    fields = {"tools": [F, PATCH], "tool_choice": {"type": "allowed_tools", "allowed_tools": functions}}
    assert (await server.chat(**fields)).status_code == 200
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
    assert '"name": "f"' in prompt
    assert "patch" not in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [PATCH], "tool_choice": {"type": "function", "function": {"name": "patch"}}}, "tool_choice"),
        ({"tools": [PATCH, held("start: A")], "tool_choice": "auto"}, "tools"),
        ({"tools": [held("start: missing_rule")], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [held("x", "gbnf")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, None),
        ({"tools": [held("start: /a/")], "use_beam_search": True}, "tools"),
        (
            {
                "tools": [F],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            },
            "tool_choice",
        ),
    ],
)
async def test_tools_and_choices_that_cannot_be_are_refused(serve, fields, param):
    server = await serve(max_model_len=ROOM)
    error = error_of(await server.chat(**fields), 400)
    if param is not None:
        assert error["param"] == param
    assert not server.engine.submitted


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"id": "1", "type": "custom"}, "custom"),
        ({"id": "1", "type": "function"}, "function"),
        ({"id": "1", "type": "custom", "custom": TO_P, "function": {"name": "p", "arguments": ""}}, "function"),
        ({"id": "1", "custom": TO_P}, "function"),
    ],
)  # fmt: skip
async def test_past_calls_are_of_one_kind(serve, call, param):
    server = await serve(max_model_len=ROOM)
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    error = error_of(await server.chat(messages=messages), 400)
    assert error["param"] == f"messages[{len(MESSAGES)}].tool_calls[0].{param}"


async def test_a_custom_tool_is_counted_as_it_is_told(serve):
    server = await serve(PATCH_CALL, max_model_len=ROOM)
    fields = {"tools": [held(PATCH_RULES)]}
    used = (await server.chat(**fields)).json()["usage"]["prompt_tokens"]
    assert (await server.post("/tokenize", {"messages": MESSAGES, **fields})).json()["count"] == used


async def test_no_reader_is_left_over_from_another_answer(serve):
    """A call that breaks comes again as content, and the next one is read from its beginning."""
    broken = '<tool_call>\n{"name": "patch", "arguments": {"input": "a" oops}}\n</tool_call>'
    server = await serve(f"{broken}\n{PATCH_CALL}", max_model_len=ROOM)
    choice = (await server.chat(tools=[PATCH])).json()["choices"][0]
    assert [call["custom"]["input"] for call in choice["message"]["tool_calls"]] == [PATCHED]
    calls, _ = await streamed(server, tools=[PATCH])
    assert calls[-1]["custom"]["input"] == PATCHED
