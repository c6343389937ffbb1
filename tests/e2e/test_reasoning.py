"""Reasoning with a real model that never learnt to: the template opens the block, and the budget closes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
BUDGET = 12
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": TOOL["function"]["parameters"], "strict": True},
}


@pytest.fixture(scope="module")
def thinking(start_for_module, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE)
    server = start_for_module("--chat-template", str(path))
    server.wait_until_healthy()
    client = server.client()
    model = client.models.list().data[0].id

    def ask(**fields: Any) -> Any:
        messages = [{"role": "user", "content": "What is the weather like in Paris?"}]
        budget = {"thinking_token_budget": BUDGET}
        request = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 80, "extra_body": budget}
        return client.chat.completions.create(**{**request, **fields})

    return ask


def test_the_budget_ends_the_thinking_and_the_answer_follows(thinking):
    answer = thinking()
    message = answer.choices[0].message
    assert message.reasoning
    assert message.reasoning == message.reasoning_content
    assert "</think>" not in message.content
    details = answer.usage.completion_tokens_details
    num_marks = details.reasoning_tokens - BUDGET
    assert 1 <= num_marks <= 6  # what this tokenizer takes for </think>
    hidden = thinking(extra_body={"thinking_token_budget": BUDGET, "include_reasoning": False})
    assert not getattr(hidden.choices[0].message, "reasoning", None)
    assert hidden.choices[0].message.content == message.content


def test_a_form_holds_only_what_follows_the_thinking(thinking):
    message = thinking(response_format=FORM).choices[0].message
    assert message.reasoning
    assert json.loads(message.content)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_follows_the_thinking(thinking, stream):
    answer = thinking(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=stream)
    if not stream:
        message = answer.choices[0].message
        thought, arguments = message.reasoning, message.tool_calls[0].function.arguments
        assert message.content is None
    else:
        deltas = [chunk.choices[0].delta for chunk in answer]
        thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        arguments = "".join(call.function.arguments or "" for delta in deltas for call in delta.tool_calls or [])
        assert not any(delta.content for delta in deltas)
    assert thought
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_no_thought_at_all_is_a_budget_too(thinking):
    message = thinking(response_format=FORM, extra_body={"thinking_token_budget": 0}).choices[0].message
    assert not getattr(message, "reasoning", None)
    assert json.loads(message.content)
