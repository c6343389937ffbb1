"""Anthropic's history as a chat's messages: turns, blocks, calls and their results, and what cannot be said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.api.anthropic import request_types
from server.api.anthropic.history import FAILED, tool_use_id
from server.api.anthropic.prepare import PreparedMessages, generate_request, prepare
from server.generate.encode import messages_json
from server.generate.request import GenerateRequest, OnlyFunction
from server.generate.structured.grammar import JsonSchema
from server.http.errors import InvalidRequest
from server.models.prompt import ChatTemplate

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
SWITCHED = ChatTemplate("{% if enable_thinking %}{{ messages }}{% endif %}")
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "input_schema": SCHEMA}


def decoded(messages: Any = (USER,), **fields: Any) -> request_types.MessagesRequest:
    body = {"model": "tiny", "max_tokens": 2000, "messages": list(messages), **fields}
    return request_types.MESSAGES.decode(json.dumps(body).encode(), [])


def ask(messages: Any = (USER,), template: ChatTemplate = TEMPLATE, **fields: Any) -> PreparedMessages:
    return prepare(decoded(messages, **fields), template)


def request(template: ChatTemplate = TEMPLATE, **fields: Any) -> GenerateRequest:
    given = decoded(**fields)
    return generate_request(given, prepare(given, template))


def said(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return messages_json(ask(messages, **fields).chat.messages)


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


def use(id: str, **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "weather", "input": input}


def result(id: str, content: Any = "Rain.", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


CALLED = (
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": [text("Hm."), use("toolu_1", city="Paris")]},
)


# --- turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_the_system_prompt_stands_first(system):
    assert said(USER, system=system) == [{"role": "system", "content": "Be brief."}, USER]


def test_several_blocks_of_text_stay_several_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert said({"role": "user", "content": [text("a"), text("b")]}) == [{"role": "user", "content": parts}]


def test_neighbours_of_one_role_are_one_turn():
    found = said(USER, {"role": "user", "content": "there"}, {"role": "assistant", "content": "Yes"}, USER)
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert [part["text"] for part in found[0]["content"]] == ["Hi", "there"]


def test_a_system_message_may_stand_between_turns():
    found = said(USER, {"role": "system", "content": [text("Now in French.")]}, USER)
    assert found[1] == {"role": "system", "content": "Now in French."}


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_where_the_template_has_no_place_for_it_the_user_tells_what_it_says(source):
    between = {"role": "system", "content": [text("In French."), text("Please.")]}
    (message,) = messages_json(ask([USER, between], template=ChatTemplate(source)).chat.messages)
    assert [part["text"] for part in message["content"]] == [
        "Hi", "<system-reminder>\nIn French.\n</system-reminder>", "<system-reminder>\nPlease.\n</system-reminder>",
    ]  # fmt: skip


def test_calls_and_their_results_find_each_other():
    found = said(*CALLED, {"role": "user", "content": [result("toolu_1"), text("And tomorrow?")]})
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "Hm.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
            ],
        },
        {"role": "tool", "content": "Rain.", "name": "weather", "tool_call_id": "1"},
        {"role": "user", "content": "And tomorrow?"},
    ]


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [
        (None, None, ""),
        ([], False, ""),
        ([{"type": "text", "text": "Rain."}], None, "Rain."),
        ("no such city", True, FAILED + "no such city"),
        ([{"type": "text", "text": "no"}], True, FAILED + "no"),
        (None, True, FAILED),
    ],
)
def test_a_result_is_text_and_says_when_it_is_an_error(content, is_error, shown):
    turn = {"role": "user", "content": [result("toolu_1", content, is_error=is_error)]}
    assert said(*CALLED, turn)[2]["content"] == shown


def test_thinking_is_given_back_to_the_model_without_its_signature():
    thought = {"type": "thinking", "thinking": "Simple.", "signature": "x"}
    found = said(USER, {"role": "assistant", "content": [thought, text("4")]}, USER)
    assert found[1] == {"role": "assistant", "content": "4", "reasoning": "Simple."}


def test_what_only_its_maker_can_read_is_left_out_and_named():
    sealed = {"type": "redacted_thinking", "data": "x"}
    made = ask([USER, {"role": "assistant", "content": [sealed, text("4")]}, USER])
    assert made.ignored == ["redacted_thinking"]
    assert made.chat.messages[1].reasoning is None


def test_a_header_for_accounting_is_left_out_and_named_so_that_prefixes_stay_the_same():
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3;"}
    made = ask(system=[header, text("Be brief.")])
    assert made.chat.messages[0].content == "Be brief."
    assert made.ignored == ["x-anthropic-billing-header"]
    mentioned = "x-anthropic-billing-header: is what the first line said.\nWhat is it?"
    assert ask(system=mentioned).chat.messages[0].content == mentioned
    assert ask(system=[header]).chat.messages[0].role == "user"


def test_an_answer_may_be_begun_by_the_client():
    made = ask([USER, {"role": "assistant", "content": "The answer is ("}])
    assert made.chat.continue_final_message
    assert not ask().chat.continue_final_message
    assert not ask([USER, {"role": "assistant", "content": ""}]).chat.continue_final_message


def test_ids_of_calls_come_back_as_the_model_gave_them():
    for id in ("functions.weather:0", "abcdefghi"):
        assert tool_use_id(id) == f"toolu_{id}"
        called = {"role": "assistant", "content": [use(tool_use_id(id))]}
        found = said(USER, called, {"role": "user", "content": [result(tool_use_id(id))]})
        assert found[1]["tool_calls"][0]["id"] == found[2]["tool_call_id"] == id
    assert tool_use_id("call_0a1b") == "toolu_0a1b"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "YQ=="}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "YQ=="}


def test_pictures_stand_where_they_were_shown():
    turns = [USER, {"role": "assistant", "content": [use("toolu_1")]}]
    turns.append({"role": "user", "content": [result("toolu_1", [text("a"), IMAGE]), IMAGE, text("b")]})
    *_, tool, user = ask(turns).chat.messages
    assert [getattr(part, "where", part) for part in [*tool.content, *user.content]] == [
        "a", "messages[2].content[0].content[1].source.data", "messages[2].content[1].source.data", "b",
    ]  # fmt: skip
    assert tool.content[1].source.text == "YQ=="


def test_documents_of_text_are_read_with_their_title():
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "said"}}
    mixed = {"type": "document", "source": {"type": "content", "content": [text("x"), IMAGE]}}
    [message] = ask([{"role": "user", "content": [plain, mixed]}]).chat.messages
    assert message.content[:2] == ["T\n\nsaid", "x"]
    assert message.content[2].where == "messages[0].content[1].source.content[1].source.data"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "assistant", "content": [IMAGE]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [text("a"), {"type": "document", "source": PDF}]}],
            "messages[0].content[1].source",
        ),
        ([{"role": "user", "content": [{"type": "search_result"}]}], "messages[0].content[0]"),
        (
            [*CALLED, {"role": "user", "content": [result("toolu_1", [{"type": "search_result"}])]}],
            "messages[2].content[0].content[0]",
        ),
        ([{"role": "user", "content": [use("toolu_1")]}], "messages[0].content[0]"),
        ([USER, {"role": "assistant", "content": [result("toolu_1")]}], "messages[1].content[0]"),
        ([{"role": "system", "content": [{"type": "thinking", "thinking": "a"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([USER, {"role": "assistant", "content": []}, USER], "messages[1].content"),
        ([{"role": "assistant", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": [result("toolu_1")]}], "messages[0].content"),
        ([*CALLED, {"role": "user", "content": [result("toolu_2")]}], "messages[2].content"),
        ([*CALLED, {"role": "user", "content": [result("toolu_1"), result("toolu_1")]}], "messages[2].content"),
        ([*CALLED, USER], "messages[2].content"),
        (CALLED, "messages[1].content"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_place(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        ask(messages)
    assert caught.value.param == param
    assert param.partition(".")[0] in caught.value.message


# --- everything else ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "theirs", "parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", True),
    ],
)
def test_choices_of_tools_have_their_counterpart(choice, theirs, parallel):
    chat = ask(tools=[WEATHER], tool_choice=choice).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == (theirs, parallel)


def test_one_tool_may_be_chosen():
    choice = ask(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}).chat.tool_choice
    assert choice == OnlyFunction("weather")


def test_a_tools_examples_stand_in_its_schema():
    tool = {**WEATHER, "type": "custom", "description": "d", "strict": True, "input_examples": [{"city": "Paris"}]}
    (made,) = ask(tools=[tool]).chat.tools
    assert made.parameters == {**SCHEMA, "examples": [{"city": "Paris"}]}
    assert (made.name, made.description, made.strict) == ("weather", "d", True)
    assert not ask(tools=[]).chat.tools


def test_sampling_has_its_counterpart():
    made = request(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"], cache_salt="s", priority=2)
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.top_k) == (0.5, 0.9, 5)
    assert (made.shown.stop, made.cache_salt, made.priority) == (("END",), "s", 2)
    assert (made.max_tokens, made.default_max_tokens) == (None, 2000)


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_format_of_the_answer_is_a_constraint_that_names_its_field(place):
    form = {"type": "json_schema", "schema": SCHEMA}
    constraint = request(**{place: {"format": form} if place == "output_config" else form}).constraint
    assert constraint is not None
    assert constraint.grammar == JsonSchema(SCHEMA)
    assert (
        constraint.param
        == {"output_config": "output_config.format.schema", "output_format": "output_format.schema"}[place]
    )


@pytest.mark.parametrize(
    ("thinking", "switch", "budget", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 1500}, True, 1500, True),
        ({"type": "adaptive"}, True, None, True),
        ({"type": "disabled"}, False, None, False),
    ],
)
def test_thinking_is_switched_where_the_template_has_a_switch(thinking, switch, budget, shown):
    made = ask(template=SWITCHED, thinking=thinking, output_config={"effort": "low"})
    assert made.chat.template_kwargs == {"enable_thinking": switch}
    made_request = request(SWITCHED, thinking=thinking)
    assert (made_request.thinking_token_budget, made_request.shown.reasoning) == (budget, shown)
    assert made.chat.reasoning_effort == "low"
    assert made.wants_thinking == switch


def test_thinking_is_ended_as_it_begins_where_the_template_has_no_switch():
    assert request(thinking={"type": "disabled"}).thinking_token_budget == 0
    assert request().thinking_token_budget is None


def test_what_the_client_tells_the_template_wins():
    given = {"enable_thinking": False, "mood": "good"}
    assert (
        ask(template=SWITCHED, thinking={"type": "adaptive"}, chat_template_kwargs=given).chat.template_kwargs == given
    )


def test_thinking_may_be_left_out_of_the_answer():
    assert not ask(thinking={"type": "adaptive", "display": "omitted"}).shows_thinking
    assert ask(thinking={"type": "adaptive", "display": "summarized"}).shows_thinking
