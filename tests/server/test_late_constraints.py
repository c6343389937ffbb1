"""Constraints that turn out to be impossible in the middle of an answer, on every API: the client's mistake, named as such."""

from __future__ import annotations

import json

import pytest

WORDS = "12001 items; the limit is 2000"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"type": "json_schema", "name": "x", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ROUTES = {
    "/v1/completions": ({"prompt": "Hi", "guided_json": SCHEMA}, "guided_json"),
    "/v1/chat/completions": (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
    "/v1/responses": ({"input": "Hi", "text": {"format": NAMED}}, "text.format.schema"),
    "/v1/messages": (
        CHAT | {"model": "tiny", "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format.schema",
    ),
    "/api/chat": (CHAT | {"model": "tiny", "format": SCHEMA, "stream": False}, "format"),
    "/completion": ({"prompt": "Hi", "json_schema": SCHEMA}, "json_schema"),
}  # fmt: skip


async def asked(serve, path: str, **more):
    """The answer to a request whose constraint fails behind its second token."""
    server = await serve(paused=True)
    act = lambda: (server.engine.step(2), server.engine.refuse_constraints(WORDS))  # noqa: E731
    return await server.while_it_waits(path, ROUTES[path][0] | more, act)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_constraint_that_fails_late_is_400_and_names_its_field_and_why(serve, path, caplog):
    answer = await asked(serve, path)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    words = f"{ROUTES[path][1]}: {WORDS}"
    assert (error if isinstance(error, str) else error["message"]) == words
    if not isinstance(error, str):
        assert error["type"] == "invalid_request_error"
        assert error.get("param", ROUTES[path][1]) == ROUTES[path][1]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_ends_with_an_event_that_says_so(serve, path):
    answer = await asked(serve, path, stream=True)
    assert answer.status_code == 200  # which was said before
    events = [json.loads(line[line.index("{") :]) for line in answer.text.splitlines() if "{" in line]
    error = events[-1].get("error") or events[-1]["response"]["error"]
    assert (error if isinstance(error, str) else error["message"]) == f"{ROUTES[path][1]}: {WORDS}"
    if path == "/v1/responses":
        assert (events[-1]["type"], error["code"]) == ("response.failed", "invalid_prompt")
    elif not isinstance(error, str):
        assert error["type"] == "invalid_request_error"


async def test_a_tool_s_schema_that_fails_late_is_named_by_the_tools(serve):
    server = await serve(paused=True, max_model_len=8192)
    body = CHAT | {"tools": [TOOL], "tool_choice": "required"}
    answer = await server.while_it_waits("/v1/chat/completions", body, lambda: server.engine.refuse_constraints(WORDS))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


async def test_one_of_several_answers_that_fails_ends_the_request(serve):
    answer = await asked(serve, "/v1/completions", n=3)
    assert answer.status_code == 400
