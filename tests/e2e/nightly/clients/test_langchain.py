"""LangChain's chat model over chats and over Responses: text, streams, tools and structured output; and its embeddings."""

from __future__ import annotations

from typing import Literal

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings, custom_tool
from pydantic import BaseModel

QUESTION = "Name the capital of France."


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Rome"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sun"


@custom_tool
def run(code: str) -> str:
    """Runs code."""
    return code


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def chat(request, server, model) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.base + "/v1",
        api_key="none",
        model=model,
        temperature=0,
        max_tokens=100,
        use_responses_api=request.param,
    )


def test_answers_come_whole_and_in_pieces(chat):
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text
    assert "".join(piece.text for piece in chat.stream(QUESTION)) == whole.text
    assert whole.usage_metadata["total_tokens"] > whole.usage_metadata["input_tokens"]


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_tool_is_called_and_its_result_read(chat, choice):
    bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke("What is the weather in Rome?")
    (call,) = answer.tool_calls
    result = weather.invoke(call)
    assert chat.bind_tools([weather], tool_choice="none").invoke([("user", "?"), answer, result]).text


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_is_what_the_model_says(chat, method):
    assert isinstance(chat.with_structured_output(Place, method=method).invoke("Where is the Colosseum?"), Place)


def test_a_custom_tool_gets_its_text(server, model):
    """Which this client has over Responses only."""
    chat = ChatOpenAI(base_url=server.base + "/v1", api_key="none", model=model, use_responses_api=True, max_tokens=100)
    bound = chat.bind_tools([run], tool_choice={"type": "custom", "name": "run"}, parallel_tool_calls=False)
    answer = bound.invoke("Print 1.")
    assert answer.response_metadata["status"] in ("completed", "incomplete")
    assert answer.content[-1]["type"] == "custom_tool_call"


def test_embeddings(embedder):
    vectors = OpenAIEmbeddings(
        base_url=embedder.base + "/v1", api_key="none", model="all-minilm-l6-v2", check_embedding_ctx_length=False
    )
    (document,), query = vectors.embed_documents([QUESTION]), vectors.embed_query(QUESTION)
    assert document == pytest.approx(query, abs=1e-5)
    assert len(query) == 384
