"""Tools, forms, log-probabilities and their streams through the official openai package, with a real 135M model: grammars make what
it writes certain enough to assert on."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import jiter  # of openai
import openai
import pydantic
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather like in Paris, in celsius? Use the tool."}]


@pytest.fixture(scope="module")
def ask(server):
    """Chats with the model, at temperature 0 unless told otherwise."""
    client = server.client()
    model = client.models.list().data[0].id

    def create(**fields: Any) -> Any:
        return client.chat.completions.create(**{"model": model, "temperature": 0, "max_tokens": 200, **fields})

    return create


# --- tools --------------------------------------------------------------------------------------------------------


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Annotated[str, pydantic.Field(max_length=20)]
    unit: Literal["celsius", "fahrenheit"]
    days: Annotated[int, pydantic.Field(ge=1, le=9)]


class GetTime(pydantic.BaseModel):
    """The time of day in a time zone."""

    model_config = pydantic.ConfigDict(extra="forbid")

    zone: Literal["UTC", "CET"]


MODELS = {"GetWeather": GetWeather, "GetTime": GetTime}
STRICT = [openai.pydantic_function_tool(model) for model in MODELS.values()]
TOOLS = [{**tool, "function": {**tool["function"], "strict": False}} for tool in STRICT]
NAMED = {"type": "function", "function": {"name": "GetTime"}}


def called(calls: Any) -> list[pydantic.BaseModel]:
    return [MODELS[call.function.name].model_validate_json(call.function.arguments) for call in calls]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_required_call_is_a_call_whose_arguments_fit(ask, temperature):
    for tools in (TOOLS, STRICT):
        choice = ask(
            messages=ASK_WEATHER, tools=tools, tool_choice="required", temperature=temperature, seed=1
        ).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert called(choice.message.tool_calls)


def test_a_named_tool_is_the_one_that_is_called_and_once(ask):
    for seed in range(3):
        choice = ask(messages=ASK_WEATHER, tools=TOOLS, tool_choice=NAMED, temperature=1, seed=seed).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["GetTime"]
        assert called(choice.message.tool_calls)


def test_no_call_where_none_may_be_and_at_most_one_where_they_may_not_be_parallel(ask):
    assert not ask(messages=ASK_WEATHER, tools=TOOLS, tool_choice="none", max_tokens=20).choices[0].message.tool_calls
    for seed in range(3):
        fields = {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 1.5,
            "seed": seed,
        }
        assert len(ask(messages=ASK_WEATHER, **fields).choices[0].message.tool_calls) == 1


def test_streamed_arguments_add_up_to_the_whole_ones(ask):
    fields = {"messages": ASK_WEATHER, "tools": STRICT, "tool_choice": "required"}
    whole = ask(**fields).choices[0].message.tool_calls
    names: list[str] = []
    arguments: list[str] = []
    for chunk in ask(**fields, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            if part.id:
                assert part.index == len(names)
                names.append(part.function.name)
                arguments.append("")
            arguments[part.index] += part.function.arguments or ""
        last = chunk.choices[0].finish_reason
    assert [(call.function.name, call.function.arguments) for call in whole] == list(zip(names, arguments, strict=True))
    assert last == "tool_calls"


def test_the_clients_own_helpers_read_calls_whole_and_streamed(server):
    client = server.client()
    fields: Any = {
        "model": client.models.list().data[0].id, "messages": ASK_WEATHER, "tools": STRICT, "tool_choice": "required",
        "temperature": 0, "max_tokens": 200,
    }  # fmt: skip
    calls = client.chat.completions.parse(**fields).choices[0].message.tool_calls
    assert isinstance(calls[0].function.parsed_arguments, tuple(MODELS.values()))
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]


def test_a_result_goes_back_and_the_model_answers_in_words(ask):
    call = ask(messages=ASK_WEATHER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": '{"temperature": 21, "sky": "clear"}'}
    answer = ask(messages=[*ASK_WEATHER, call, result], tools=TOOLS, tool_choice="none", max_tokens=40)
    assert answer.choices[0].message.content


# --- forms --------------------------------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=30)]
    age: Annotated[int, pydantic.Field(ge=0, le=130)]
    languages: Annotated[list[Literal["English", "French", "German"]], pydantic.Field(min_length=1, max_length=3)]
    born_in: str | None


DESCRIBE: list[Any] = [{"role": "user", "content": "Describe Ada Lovelace."}]


def test_a_json_schema_is_held_to_by_chat_streamed_or_not_and_for_every_choice(server):
    client = server.client()
    model = client.models.list().data[0].id
    fields: Any = {"model": model, "messages": DESCRIBE, "max_tokens": 300, "response_format": Person, "seed": 3}
    parsed = client.chat.completions.parse(**fields, n=3, temperature=1.0)
    assert [choice.finish_reason for choice in parsed.choices] == ["stop"] * 3
    assert all(isinstance(choice.message.parsed, Person) for choice in parsed.choices)
    assert len({choice.message.content for choice in parsed.choices}) == 3
    whole = client.chat.completions.parse(**fields, temperature=0).choices[0].message.content
    with client.chat.completions.stream(**fields, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole


def json_of(choice: Any) -> Any:
    """What is answered; or its beginning, where the model, whose words differ by processor, found no end within max_tokens."""
    cut = choice.finish_reason == "length"
    return jiter.from_json(choice.message.content.encode(), partial_mode="trailing-strings" if cut else "off")


def test_json_mode_gives_an_object(ask):
    messages = [{"role": "user", "content": "Name a colour and its hex code as JSON."}]
    answer = ask(messages=messages, max_tokens=400, response_format={"type": "json_object"})
    assert isinstance(json_of(answer.choices[0]), dict)


def test_an_answer_in_a_form_may_be_a_call_instead(ask):
    answer = ask(messages=DESCRIBE, tools=TOOLS, max_tokens=400, response_format={"type": "json_object"}).choices[0]
    assert called(answer.message.tool_calls) if answer.message.tool_calls else json_of(answer)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"regex": r"\+33 [1-9]( \d\d){4}"}, r"\+33 [1-9]( [0-9]{2}){4}"),
        ({"grammar": 'root ::= ("yes" | "no") ", " [a-z]{3,12} "."'}, r"(yes|no), [a-z]{3,12}\."),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_structured_outputs_hold_chat_and_completions_to_their_form(server, outputs, pattern):
    client = server.client()
    model = client.models.list().data[0].id
    fields: Any = {"model": model, "max_tokens": 60, "seed": 1, "extra_body": {"structured_outputs": outputs}}
    for temperature in (0, 1.5):
        chat = client.chat.completions.create(**fields, messages=QUESTION, temperature=temperature).choices[0]
        text = client.completions.create(**fields, prompt="I love it. Is that", temperature=temperature).choices[0]
        assert (chat.finish_reason, text.finish_reason) == ("stop", "stop")
        assert re.fullmatch(pattern, chat.message.content or "")
        assert re.fullmatch(pattern, text.text)


def test_a_stop_string_and_ignore_eos_end_a_structured_answer_as_they_should(server):
    client = server.client()
    fields: Any = {"model": client.models.list().data[0].id, "prompt": "a", "max_tokens": 60, "temperature": 0}
    digits = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{3}"}}
    stopped = client.completions.create(**fields, stop="-", extra_body=digits).choices[0]
    assert (stopped.finish_reason, len(stopped.text)) == ("stop", 3)
    complete = client.completions.create(**fields, extra_body={**digits, "ignore_eos": True}).choices[0]
    assert complete.finish_reason == "stop"
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", complete.text)


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_log_probabilities_of_a_chat_are_those_of_its_tokens_streamed_or_not(ask):
    fields = {"messages": QUESTION, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    whole = ask(**fields).choices[0]
    entries = whole.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().strip() == whole.message.content.strip()
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    streamed = [
        entry for chunk in ask(**fields, stream=True) for choice in chunk.choices if choice.logprobs
        for entry in choice.logprobs.content or []
    ]  # fmt: skip
    assert [(entry.token, entry.bytes) for entry in streamed] == [(entry.token, entry.bytes) for entry in entries]
    assert all(
        math.isclose(one.logprob, other.logprob, abs_tol=1e-4) for one, other in zip(streamed, entries, strict=True)
    )


def test_a_prompt_is_scored_by_an_echo_without_new_tokens(server):
    client = server.client()
    model = client.models.list().data[0].id
    text = "The capital of France is Paris"
    choice = client.completions.create(model=model, prompt=text, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert choice.text == text
    scores = choice.logprobs
    assert "".join(scores.tokens) == text
    assert scores.text_offset == [sum(map(len, scores.tokens[:at])) for at in range(len(scores.tokens))]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[-1] > -2  # the model knows
    assert all(score < 0 for score in scores.token_logprobs[1:])


# --- fields -------------------------------------------------------------------------------------------------------


def test_every_field_the_client_can_name_is_taken_or_refused_and_unknown_ones_are_named(server):
    client = server.client()
    model = client.models.list().data[0].id
    known: Any = {
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": 1}, "n": 2, "seed": 1, "stop": ["\n\n"],
        "temperature": 0.5, "top_p": 0.9, "user": "u", "metadata": {"a": "b"}, "service_tier": "auto",
        "parallel_tool_calls": True, "safety_identifier": "s", "prompt_cache_key": "k", "logprobs": True, "top_logprobs": 1,
        "max_completion_tokens": 5, "reasoning_effort": None,
    }  # fmt: skip
    extra = {
        "min_p": 0.1, "top_k": 5, "repetition_penalty": 1.1, "min_tokens": 1, "allowed_token_ids": [20, 21, 22, 23],
        "bad_words": ["x"], "ignore_eos": True, "truncate_prompt_tokens": 20, "return_token_ids": True, "cache_salt": "s",
        "add_generation_prompt": True, "chat_template_kwargs": {}, "documents": [], "priority": 0,
        "include_reasoning": True, "thinking_token_budget": 5, "request_id": "mine",
    }  # fmt: skip
    raw = client.chat.completions.with_raw_response.create(model=model, messages=QUESTION, **known, extra_body=extra)
    assert "x-ignored-fields" not in raw.headers
    assert raw.parse().id == "chatcmpl-mine"
    odd = client.chat.completions.with_raw_response.create(
        model=model,
        messages=QUESTION,
        max_tokens=1,
        extra_headers={"X-Request-Id": "other"},
        extra_body={"colour": 1, "documents": [{"text": "d"}], "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert odd.headers["x-ignored-fields"] == "colour, documents, chat_template_kwargs.enable_thinking"
    assert odd.headers["x-request-id"] == "other"
