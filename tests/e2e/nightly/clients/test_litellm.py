"""LiteLLM by each of its providers that speak one of our APIs: text, streams, tools, an object; and Responses."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Literal

import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks GitHub for prices

import litellm

ASK = [{"role": "user", "content": "Name the capital of France."}]
PROVIDERS = {
    "anthropic": "", "hosted_vllm": "/v1", "llamafile": "/v1", "lm_studio": "/v1", "ollama": "", "ollama_chat": "", "openai": "/v1",
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.fixture(params=PROVIDERS)
def given(request, server, model) -> dict:
    name = request.param
    base = server.base + PROVIDERS[name]
    return {"model": f"{name}/{model}", "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 40}


def test_answers_come_whole_and_in_pieces(given):
    whole = litellm.completion(messages=ASK, **given)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    pieces = list(litellm.completion(messages=ASK, stream=True, **given))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content


@pytest.mark.parametrize("given", [name for name in PROVIDERS if "ollama" not in name], indirect=True)
def test_a_tool_is_called_and_its_result_read(given):
    """Ollama's API cannot ask for a call, and a small model makes none unasked."""
    question = {"role": "user", "content": "What is the weather in Rome?"}
    answer = litellm.completion(messages=[question], tools=[WEATHER], tool_choice="required", **given).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    assert (
        litellm.completion(messages=[question, answer.message, result], tools=[WEATHER], **given)
        .choices[0]
        .message.content
    )


def test_an_object_keeps_its_schema(given):
    answer = litellm.completion(messages=ASK, response_format=Place, **given).choices[0].message
    assert Place.model_validate_json(answer.content).city == "Paris"


@pytest.mark.parametrize("given", ["openai", "hosted_vllm"], indirect=True)
def test_a_response_and_its_usage(given):
    fields = {name: given[name] for name in ("model", "api_base", "api_key", "temperature")}
    response = litellm.responses(input="Name the capital of France.", max_output_tokens=40, **fields)
    assert "Paris" in response.output[0].content[0].text
    assert response.usage.output_tokens > 0


def test_a_prompt_is_completed(server, model):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The capital of France is", api_base=server.base + "/v1", api_key="none",
        temperature=0, max_tokens=4,
    )  # fmt: skip
    assert "Paris" in answer.choices[0].text


@pytest.mark.parametrize("given", ["openai", "anthropic"], indirect=True)
def test_what_is_wrong_is_told_as_the_clients_error(given):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=ASK, **given | {"temperature": -3})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=ASK, **given | {"model": given["model"] + "-no"})


@pytest.mark.parametrize("given", ["openai"], indirect=True)
async def test_an_asynchronous_stream_ends_with_usage(given):
    stream = await litellm.acompletion(messages=ASK, stream=True, stream_options={"include_usage": True}, **given)
    async with asyncio.timeout(None):
        pieces = [piece async for piece in stream]
    assert pieces[-1].usage.completion_tokens > 0
