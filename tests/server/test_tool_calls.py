"""Tool calls in chats: what a model writes, in any format, as the messages and chunks OpenAI's clients read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from server.text.tools.registry import TOOL_PARSERS
from tests.server.conftest import MESSAGES, Running
from tests.server.test_refusals import error_of
from tests.server.text.tool_samples import CALL, PARIS, SAMPLES, TIME, TOOLS, Sample
from tests.server.tiny import EOS, SPECIAL, tiny_tokenizer

CHAT = "/v1/chat/completions"
HERMES = f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"
TWO = f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "time"}}\n</tool_call>'
ROOM = 8192  # tokens: a byte each, and tools are told of at length
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=[f"{s.tool_parser}-{at}" for at, s in enumerate(SAMPLES)])


def speaker(tool_parser: str, *, special: bool):
    """A tokenizer that has the tool parser's marks as special tokens, or only as bytes."""
    return tiny_tokenizer(*sorted(TOOL_PARSERS[tool_parser].strings() - set(SPECIAL)) if special else ())


def together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of choice 0 add up to, checked against the rules of streams."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            assert len(delta.keys() & {"content", "reasoning", "tool_calls"}) <= 1
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                calls = message["tool_calls"]
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert (call["type"], call["function"]["arguments"]) == ("function", "")
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert events[-1]["choices"][0]["delta"] == {}
    message["finish_reason"] = events[-1]["choices"][0]["finish_reason"]
    return message


async def both(server: Running, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A whole answer's first choice, and what a stream of the same adds up to, which has to agree where nothing is broken."""
    body = (await server.chat(tools=TOOLS, **fields)).json()
    streamed = together(await server.events(CHAT, messages=MESSAGES, tools=TOOLS, **fields))
    return body["choices"][0], streamed


# --- every tool parser ---------------------------------------------------------------------------------------------


@every_sample
@pytest.mark.parametrize("special", [False, True])
async def test_every_tool_parser_comes_out_in_openais_shape_whole_and_streamed(serve, sample: Sample, special):
    server = await serve(
        sample.written,
        speaks=speaker(sample.tool_parser, special=special),
        tool_parser=sample.tool_parser,
        max_model_len=ROOM,
    )
    choice, streamed = await both(server)
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert message["content"] == (sample.text or (None if sample.calls or sample.reasoning else ""))
    assert message.get("reasoning", "") == message.get("reasoning_content", "") == sample.reasoning
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == sample.calls
    assert {call["type"] for call in calls} <= {"function"}
    assert choice["finish_reason"] == streamed["finish_reason"] == ("tool_calls" if calls else "stop")
    assert (streamed["content"], streamed["reasoning"]) == (sample.text, sample.reasoning)
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)


@every_sample
async def test_the_openai_client_reads_every_tool_parser(serve, sample: Sample):
    server = await serve(
        sample.written,
        speaks=speaker(sample.tool_parser, special=True),
        tool_parser=sample.tool_parser,
        max_model_len=ROOM,
    )
    async with server.openai() as client:
        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        calls = answer.choices[0].message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == sample.calls
        assert (answer.choices[0].message.content or "") == sample.text
        assert answer.choices[0].finish_reason == ("tool_calls" if sample.calls else "stop")


@pytest.mark.parametrize("tool_parser", TOOL_PARSERS)
async def test_without_tools_what_looks_like_a_call_is_text(serve, tool_parser):
    sample = next(sample for sample in SAMPLES if sample.tool_parser == tool_parser and sample.calls)
    server = await serve(
        sample.written, speaks=speaker(tool_parser, special=False), tool_parser=tool_parser, max_model_len=ROOM
    )
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await server.chat(**fields)).json()["choices"][0]
        if not TOOL_PARSERS[tool_parser].reasons:  # a format that is not only for calls is read always
            assert choice["message"]["content"] == sample.written
            assert choice["finish_reason"] == "stop"


async def test_tokens_that_come_together_mean_the_same(serve):
    server = await serve(HERMES, paused=True, max_model_len=ROOM)
    stream = await server.open_stream(CHAT, messages=MESSAGES, tools=TOOLS, stream=True)
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(len(HERMES.encode()) + 1)
    await stream.head()
    body = b"".join(await stream.chunks()).decode()
    events = [json.loads(part.removeprefix("data: ")) for part in body.split("\n\n") if part.startswith("data: {")]
    message = together(events)
    assert message["content"] == "Let me see."
    assert json.loads(message["tool_calls"][0]["arguments"]) == PARIS


# --- what is not as it should be ----------------------------------------------------------------------------------


async def test_a_call_cut_off_by_the_limit_is_a_call_as_far_as_it_goes(serve):
    """As OpenAI has it: finish_reason says that it is not whole."""
    server = await serve(HERMES, max_model_len=ROOM)
    choice, streamed = await both(server, max_tokens=80)
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == streamed["content"] == "Let me see."
    assert call["function"]["name"] == streamed["tool_calls"][0]["name"] == "get_weather"
    assert call["function"]["arguments"] == streamed["tool_calls"][0]["arguments"]
    assert call["function"]["arguments"] in CALL
    assert choice["finish_reason"] == streamed["finish_reason"] == "length"


async def test_a_broken_call_beside_a_whole_one_costs_only_itself(serve):
    broken = '<tool_call>{"name": "time", "arguments": {"a": oops}}</tool_call>'
    server = await serve(f"<tool_call>{CALL}</tool_call>{broken}", max_model_len=ROOM)
    choice, streamed = await both(server)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["message"]["content"] == streamed["content"] == broken
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"


async def test_calls_that_are_all_broken_are_no_reason_to_call(serve):
    server = await serve('<tool_call>{"name": "time", "arguments": {"a": oops}}</tool_call>', max_model_len=ROOM)
    choice, streamed = await both(server)
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"


async def test_one_call_at_most_ends_the_answer_at_the_second(serve):
    server = await serve(TWO + " and more", max_model_len=ROOM)
    choice, streamed = await both(server, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    assert [call["name"] for call in streamed["tool_calls"]] == ["get_weather"]
    assert [str(reason) for _, reason in server.engine.ended] == ["stop", "stop"]
    choice, _ = await both(server, parallel_tool_calls=True)
    assert len(choice["message"]["tool_calls"]) == 2


async def test_an_id_the_model_gives_twice_is_given_once(serve):
    call = '<tool_call>{"name": "time", "id": "same", "arguments": {}}</tool_call>'
    choice, _ = await both(await serve(call * 2, max_model_len=ROOM))
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert ids[0] == "same"
    assert re.fullmatch(r"call_[0-9a-f]{24}", ids[1])


async def test_ids_for_mistral_have_the_form_its_template_takes_back(serve):
    server = await serve("[TOOL_CALLS]time[ARGS]{}", tool_parser="mistral", max_model_len=ROOM)
    choice, _ = await both(server)
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", choice["message"]["tool_calls"][0]["id"])


async def test_what_a_model_says_to_the_tools_ends_its_turn(serve):
    speaks = speaker("functiongemma", special=True)
    said = "<start_function_call>call:time{}<end_function_call><start_function_response>response:time{made up}"
    server = await serve(said, speaks=speaks, tool_parser="functiongemma", max_model_len=ROOM)
    (stop,) = server.service.lifecycle.require_model().chat_format.stop_ids
    assert speaks.token_string(stop) == "<start_function_response>"


# --- what else an answer carries ----------------------------------------------------------------------------------


async def test_several_choices_each_have_their_own_calls(serve, tokenizer):
    says = [HERMES, "No need."]
    server = await serve(script=lambda request: [*tokenizer.encode(says[request.params.seed]), EOS], max_model_len=ROOM)
    choices = (await server.chat(tools=TOOLS, n=2, seed=0)).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop"]
    assert ["tool_calls" in choice["message"] for choice in choices] == [True, False]
    events = await server.events(CHAT, messages=MESSAGES, tools=TOOLS, n=2, seed=0)
    named = [c["index"] for e in events for c in e["choices"] if "id" in (c["delta"].get("tool_calls") or [{}])[0]]
    assert named == [0]


async def test_a_stop_string_is_found_inside_a_call_too(serve):
    choice, streamed = await both(await serve(HERMES, max_model_len=ROOM), stop="metric")
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
    assert choice["stop_reason"] == "metric"
    assert choice["message"]["content"] == HERMES[: HERMES.index("metric")].replace("\n", "", 1)


async def test_ids_and_log_probabilities_of_every_token_are_there_however_events_fall(serve, tokenizer):
    server = await serve(HERMES, max_model_len=ROOM)
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    whole = (await server.chat(**fields)).json()["choices"][0]
    ids = [*tokenizer.encode(HERMES), EOS]
    assert whole["token_ids"] == ids
    events = await server.events(CHAT, messages=MESSAGES, **fields)
    choices = [event["choices"][0] for event in events]
    assert [id for choice in choices for id in choice.get("token_ids", [])] == ids
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert len(streamed) == len(ids) - 1
    assert together(events)["tool_calls"][0]["name"] == "get_weather"


async def test_usage_counts_what_calls_cost(serve):
    server = await serve(HERMES, max_model_len=ROOM)
    events = await server.events(CHAT, messages=MESSAGES, tools=TOOLS, stream_options={"include_usage": True})
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == len(HERMES.encode()) + 1
    assert "completion_tokens_details" not in usage


# --- what the model is told ---------------------------------------------------------------------------------------


async def test_a_model_whose_template_knows_no_tools_gets_them_in_the_system_message(serve, tokenizer):
    server = await serve(max_model_len=ROOM)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    assert (await server.chat(messages=messages, tools=[TIME])).status_code == 200
    prompt = tokenizer.decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '"name": "time"' in prompt
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in prompt


NATIVE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}{{ ' ' ~ m.name if m.name }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


async def test_a_template_that_knows_tools_gets_them_with_objects_for_arguments_and_names_for_results(serve):
    speaks = tiny_tokenizer(chat_template=NATIVE)
    server = await serve(speaks=speaks, max_model_len=ROOM)
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "7", "type": "function", "function": {"name": "time", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "noon"}]},
    ]
    for choice, listed in (("auto", "[get_weather][time]"), ("none", "")):
        assert (await server.chat(messages=messages, tools=TOOLS, tool_choice=choice)).status_code == 200
        prompt = speaks.decode(server.engine.submitted[-1].prompt_ids)
        assert prompt == listed + '<user>Hi<assistant><tool_call>{"a": 1}<tool time>noon'


async def test_functions_of_old_are_refused_as_such_and_read_where_they_are_history(serve, tokenizer):
    server = await serve(speaks=tiny_tokenizer(chat_template=NATIVE), max_model_len=ROOM)
    error = error_of(await server.chat(functions=[{"name": "f"}]), 400, "unsupported_parameter")
    assert error["param"] == "functions"
    assert "use tools instead" in error["message"]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "time", "arguments": "{}"}},
        {"role": "function", "name": "time", "content": "noon"},
    ]
    assert (await server.chat(messages=messages)).status_code == 200
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
    assert prompt == "<user>Hi<assistant><tool_call>{}<tool time>noon"


async def test_without_a_tool_parser_no_tools_are_taken(serve):
    server = await serve(tool_parser="none", max_model_len=ROOM)
    error = error_of(await server.chat(tools=TOOLS), 400)
    assert error["param"] == "tools"
    assert "--tool-parser" in error["message"]
    assert (await server.chat(tools=TOOLS, tool_choice="none")).status_code == 200


async def test_tokenize_counts_tools_as_a_chat_does(serve):
    server = await serve(max_model_len=ROOM)
    await server.chat(tools=TOOLS)
    counted = (await server.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS})).json()
    assert counted["tokens"] == list(server.engine.submitted[0].prompt_ids)
