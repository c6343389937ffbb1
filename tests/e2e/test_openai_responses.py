"""Responses as OpenAI's own client makes, streams, continues, cancels and forgets them, on a real model."""

from __future__ import annotations

import json

import openai
import pytest

QUESTION = "What is the capital of France? Answer in one short sentence."


def test_responses_whole_streamed_and_continued(server):
    client = server.client()
    ask = {"model": client.models.list().data[0].id, "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(input=QUESTION, **ask)
    assert "Paris" in first.output_text
    assert first.usage is not None
    with client.responses.stream(input=QUESTION, **ask) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert streamed == final.output_text == first.output_text
    second = client.responses.create(input="And of Italy?", previous_response_id=first.id, **ask)
    assert "Rome" in second.output_text
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= 16 * (first.usage.input_tokens // 16)
    items = list(client.responses.input_items.list(second.id, limit=2, order="asc"))
    assert [item.role for item in items if item.type == "message"] == ["user", "assistant", "user"]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        client.responses.retrieve(second.id)


def test_responses_call_functions_and_keep_to_schemas(server):
    client = server.client()
    ask = {"model": client.models.list().data[0].id, "temperature": 0}
    city = {"type": "string", "enum": ["Paris", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "name": "get_weather", "strict": True, "parameters": parameters}
    first_answer = client.responses.create(
        input="What is the weather in Rome?", tools=[tool], tool_choice="required", parallel_tool_calls=False, **ask
    )
    (call,) = (item for item in first_answer.output if item.type == "function_call")
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Rome"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 25 degrees."}
    answer = client.responses.create(
        input=[result],
        previous_response_id=first_answer.id,
        tools=[tool],
        tool_choice="none",
        max_output_tokens=40,
        **ask,
    )
    assert answer.output_text
    format = {"type": "json_schema", "name": "place", "schema": parameters, "strict": True}
    placed = client.responses.create(input="Where is the Colosseum?", text={"format": format}, **ask)
    assert json.loads(placed.output_text)["city"] in ("Paris", "Rome")


def test_responses_in_the_background_are_cancelled_and_streamed_again(server):
    client = server.client()
    ask = {"model": client.models.list().data[0].id, "input": "Count.", "extra_body": {"ignore_eos": True}}
    endless = client.responses.create(background=True, max_output_tokens=7000, **ask)
    assert endless.status == "queued"
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert client.responses.retrieve(endless.id).status == "cancelled"
    stream = client.responses.create(background=True, stream=True, max_output_tokens=20, **ask)
    begun = [next(iter(stream)) for _ in range(3)]
    stream.close()
    id = begun[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=begun[-1].sequence_number))
    numbers = [event.sequence_number for event in (*begun, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.incomplete"
    assert rest[-1].response.output_text == client.responses.retrieve(id).output_text
