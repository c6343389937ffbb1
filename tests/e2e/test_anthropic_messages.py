"""Messages, tools and forms through the official anthropic package, with a real 135M model."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


def anthropic_ask(server: Any, **fields: Any) -> tuple[anthropic.Anthropic, dict]:
    """A client, and what to ask with it: greedily, since what is asked has one answer."""
    client = anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0, timeout=None)
    model = server.get("/v1/models")[1]["data"][0]["id"]
    ask = {"model": model, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    return client, {**ask, **fields}


def test_messages_streamed_and_not_give_the_same_text(server):
    client, ask = anthropic_ask(server, system="You answer in one sentence.")
    whole = client.messages.create(**ask)
    assert "Paris" in whole.content[0].text
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model=ask["model"], messages=ask["messages"], system=ask["system"])
    used = streamed.usage
    assert used.cache_read_input_tokens == 16 * ((counted.input_tokens - 1) // 16)
    assert used.input_tokens + used.cache_read_input_tokens == counted.input_tokens


def test_a_prompt_may_be_put_into_the_cache_alone(server):
    client, ask = anthropic_ask(server, system="You only ever answer questions about lighthouses and their keepers.")
    before = client.messages.create(**{**ask, "max_tokens": 0})
    assert (before.content, before.stop_reason, before.usage.output_tokens) == ([], "max_tokens", 0)
    after = client.messages.create(**ask)
    assert after.usage.cache_read_input_tokens > before.usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_that_has_to_be_called_is_called_as_its_schema_says(server, choice):
    client, ask = anthropic_ask(server, tools=[WEATHER], tool_choice=choice, max_tokens=300)
    ask["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    with client.messages.stream(**ask) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    assert (use.type, use.name) == ("tool_use", "get_weather")
    assert use.input["city"] in ("Paris", "Rome")
    assert isinstance(use.input["days"], int)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Rain."}]}
    turns = [*QUESTION, message.to_param(), {"role": "user", "content": [result]}]
    again = client.messages.create(**{**ask, "tool_choice": {"type": "none"}, "messages": turns})
    assert [block.type for block in again.content] == ["text"]


def test_messages_keep_to_a_schema_and_to_stop_sequences(server):
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    client, ask = anthropic_ask(server, output_config=form, max_tokens=100)
    assert json.loads(client.messages.create(**ask).content[0].text)["capital"] in ("Paris", "Rome")
    del ask["output_config"]
    stopped = client.messages.create(**ask, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in stopped.content[0].text
