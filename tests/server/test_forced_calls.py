"""Forced calls, strict tools and budgets of thought over HTTP: which matchers the engine gets, and what is refused."""

from __future__ import annotations

import json

import pytest

from server.text.tools.registry import TOOL_PARSERS
from tests.server.structured.reading import has, reads
from tests.server.structured.test_chats import WRITTEN, speaker
from tests.server.test_reasoning_chats import BEGUN, THINKING, thinker
from tests.server.test_refusals import error_of
from tests.server.tiny import tiny_tokenizer

ROOM = 8192


def tool(name: str, properties: dict | None = None, **fields) -> dict:
    parameters = {"type": "object", "properties": properties or {}, "required": list(properties or {})}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


F, TIME = tool("f", {"a": {"type": "integer"}, "b": {"type": "string"}}), tool("time")
TOOLS = [F, TIME]
STRICT = [tool("f", {"a": {"type": "integer"}, "b": {"type": "string"}}, strict=True), TIME]
NAMED = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
BAD_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


async def check_forms(server, fields: dict, taken: list[str], refused: list[str]) -> None:
    response = await server.chat(**fields)
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    (make,) = server.engine.submitted[-1].params.matchers
    encode = server.tokenizer.encode
    assert [text for text in taken if not reads(make(), encode(text, add_special_tokens=False))] == []
    assert [text for text in refused if reads(make(), encode(text, add_special_tokens=False))] == []


async def test_a_choice_that_forces_calls_holds_the_engine_to_them(serve):
    server = await serve(max_model_len=ROOM)
    required = {"tools": TOOLS, "tool_choice": "required"}
    await check_forms(server, required, [CALL, f"{CALL}\n{TIME_CALL}"], ["Hi", BAD_CALL, f"Hi {CALL}", f"{CALL} Hi"])
    single = {**required, "parallel_tool_calls": False}
    await check_forms(server, single, [CALL, TIME_CALL], [f"{CALL}\n{TIME_CALL}"])
    await check_forms(
        server, {"tools": TOOLS, "tool_choice": NAMED}, [TIME_CALL], [CALL, f"{TIME_CALL}\n{TIME_CALL}", "Hi"]
    )


async def test_strict_tools_leave_the_choice_and_hold_their_calls(serve):
    server = await serve(max_model_len=ROOM)
    taken = ["Hi", CALL, f"Hi. {CALL}\n{TIME_CALL}"]
    await check_forms(server, {"tools": STRICT}, taken, [BAD_CALL, f"Hi. {BAD_CALL}"])
    await check_forms(server, {"tools": STRICT, "tool_choice": "required"}, [CALL], ["Hi", BAD_CALL])


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": STRICT, "tool_choice": "none"},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": None},
    ],
)
async def test_who_forces_nothing_gets_no_matcher(serve, fields):
    server = await serve(max_model_len=ROOM, speaks=thinker())
    assert (await server.chat(**fields)).status_code == 200
    assert server.engine.submitted[0].params.matchers == ()


async def test_a_format_of_the_answer_leaves_tools_to_be_called(serve):
    server = await serve(max_model_len=ROOM)
    fields = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    await check_forms(server, fields, ["{}", CALL], ["Hi", BAD_CALL])
    await check_forms(server, {**fields, "tool_choice": "none"}, ["{}"], ["Hi", CALL])


@pytest.mark.parametrize("tool_parser", TOOL_PARSERS)
async def test_with_every_tool_parser_a_forced_call_comes_out_as_one(serve, tool_parser):
    written = WRITTEN[tool_parser]
    server = await serve(written, speaks=speaker(tool_parser), tool_parser=tool_parser, max_model_len=ROOM)
    await check_forms(server, {"tools": TOOLS, "tool_choice": "required"}, [written], ["Hi"])
    answer = (await server.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in answer["message"]["tool_calls"]
    ]
    assert calls == [("f", {"a": 1, "b": "x"}), ("time", {})][: len(calls)]
    assert answer["finish_reason"] == "tool_calls"
    assert not answer["message"]["content"]


# --- reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [THINKING, BEGUN])
async def test_calls_and_forms_begin_after_the_reasoning(serve, template):
    server = await serve(max_model_len=ROOM, speaks=thinker(template))
    thought = "hm {</think>" if template == BEGUN else "<think>hm {</think>"
    required = {"tools": TOOLS, "tool_choice": "required"}
    await check_forms(server, required, [thought + CALL], [thought + "Hi"])
    form = {"response_format": {"type": "json_object"}}
    await check_forms(server, form, [thought + "{}"], [thought + "Hi"])


async def test_in_channels_only_the_final_one_has_a_form(serve):
    server = await serve(max_model_len=ROOM, speaks=speaker("harmony"), tool_parser="harmony")
    thought = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant<|channel|>final<|message|>"
    await check_forms(server, {"response_format": {"type": "json_object"}}, [thought + "{}"], [thought + "Hi", "{}"])


async def test_a_budget_ends_the_reasoning_and_a_form_holds_behind_it(serve):
    server = await serve(max_model_len=ROOM, speaks=thinker(THINKING, "<think>", "</think>"))
    fields = {"thinking_token_budget": 3, "response_format": {"type": "json_object"}}
    assert (await server.chat(**fields)).status_code == 200
    form, budget = (make() for make in server.engine.submitted[0].params.matchers)
    begin, *thought, end = server.tokenizer.encode("<think>abc</think>", add_special_tokens=False)
    for token in (begin, *thought):
        assert has(form.allowed(), token)
        assert has(budget.allowed(), token)
        form.accept(token)
        budget.accept(token)
    assert has(form.allowed(), thought[0])
    assert has(form.allowed(), end)
    assert [token for token in range(server.tokenizer.vocab_size) if has(budget.allowed(), token)] == [end]
    form.accept(end)
    budget.accept(end)
    brace, letter = server.tokenizer.encode("{a", add_special_tokens=False)
    assert budget.allowed() is None
    assert (has(form.allowed(), brace), has(form.allowed(), letter)) == (True, False)


async def test_a_model_that_does_not_reason_keeps_to_any_budget(serve):
    server = await serve()
    assert (await server.chat(thinking_token_budget=0)).status_code == 200
    assert server.engine.submitted[0].params.matchers == ()


# --- what is refused ----------------------------------------------------------------------------------------------

BEAMS = {"use_beam_search": True}
CONTINUED = {"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True}
REFUSED = [
    ({"tools": [tool("f", {"a": {"type": "colour"}}, strict=True)]}, "tools", "colour"),
    ({"tools": [tool("f", {"a": {"type": "colour"}})], "tool_choice": "required"}, "tool_choice", "colour"),
    ({"tools": [tool("f", {"a": {"enum": ["x" * 140_000]}}, strict=True)]}, "tools", "at most"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", ""),
    ({"thinking_token_budget": 1.5}, "thinking_token_budget", ""),
    ({"tools": TOOLS, "tool_choice": "required", **BEAMS}, "tool_choice", "with use_beam_search"),
    ({"tools": STRICT, **BEAMS}, "tools", "with use_beam_search"),
    ({"thinking_token_budget": 0, **BEAMS}, "thinking_token_budget", "with use_beam_search"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "words"), REFUSED, ids=[f"{param}-{at}" for at, (_, param, _) in enumerate(REFUSED)]
)
async def test_what_cannot_be_honoured_is_refused_under_its_own_name(serve, fields, param, words):
    server = await serve(max_model_len=200_000)
    error = error_of(await server.chat(**fields), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert server.engine.submitted == []


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("fields", "param"), [({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"), ({"tools": STRICT}, "tools")]
)
async def test_an_answer_on_its_channel_cannot_go_on_as_a_call(serve, fields, param):
    speaks = tiny_tokenizer(*TOOL_PARSERS["harmony"].strings(), chat_template=TURNS)
    server = await serve(speaks=speaks, tool_parser="harmony", max_model_len=ROOM)
    assert error_of(await server.chat(**CONTINUED, **fields), 400)["param"] == param
    assert (await server.chat(**CONTINUED)).status_code == 200
