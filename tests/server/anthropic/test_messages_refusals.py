"""What /v1/messages refuses, in Anthropic's shape and words, and what it takes without doing anything about it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from runtime.api import EngineStopped, QueueFull
from server.api.anthropic import api_types as answers
from server.api.anthropic.request_types import MAX_STOP_SEQUENCES
from tests.server.anthropic.test_messages import BASE, HI, MESSAGES, TOOLS, is_whole

COUNT = f"{MESSAGES}/count_tokens"


def error_of(response: Any, status: int, kind: str) -> str:
    body = response.json()
    assert (response.status_code, body["error"]["type"]) == (status, kind), body
    assert is_whole(body, answers.AnthropicError)
    assert body["request_id"] == response.headers["request-id"]
    return body["error"]["message"]


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in BASE.items() if key != name}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * (MAX_STOP_SEQUENCES + 1)}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "smell"),
        ({"messages": [{"role": "user", "content": "a", "mood": "good"}]}, "mood"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"service_tier": "platinum"}, "service_tier"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024}, "budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
        ({"tools": [{"type": "web_search_20260209", "name": "web_search", "max_uses": 5}]}, "web_search_20260209"),
        ({"tools": [*TOOLS, {"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{**TOOLS[0], "mood": "good"}]}, "mood"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOLS[0], "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "bake"}}, "bake"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "what"}}}},
            "output_config.format.schema",
        ),
        ({"priority": 3}, "priority"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_bad_fields_are_named(serve, change, named):
    server = await serve(max_model_len=8192)
    assert named in error_of(await server.post(MESSAGES, {**BASE, **change}), 400, "invalid_request_error")
    assert not server.engine.submitted
    assert (await server.post(MESSAGES, BASE)).status_code == 200


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
async def test_what_is_required_is_asked_for(serve, name):
    server = await serve()
    message = error_of(await server.post(MESSAGES, without(name)), 400, "invalid_request_error")
    assert message == f"Missing required parameter: {name}"


async def test_counting_refuses_the_same(serve):
    server = await serve()
    body = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "search_result"}]}]}
    assert "search_result" in error_of(await server.post(COUNT, body), 400, "invalid_request_error")
    error_of(await server.post(COUNT, {"model": "x", "messages": HI}), 404, "not_found_error")


async def test_statuses_have_anthropics_words(serve):
    server = await serve(max_body_size=2000, max_model_len=100)
    error_of(await server.post(MESSAGES, {**BASE, "model": "claude"}), 404, "not_found_error")
    error_of(await server.post(MESSAGES, {**BASE, "system": "x" * 2000}), 413, "request_too_large")
    long = await server.post(MESSAGES, {**BASE, "system": "x" * 200})
    assert error_of(long, 400, "invalid_request_error").startswith("prompt is too long: ")
    error_of(
        await server.http.post(MESSAGES, content=b"{", headers={"content-type": "application/json"}),
        400,
        "invalid_request_error",
    )
    error_of(await server.http.post(MESSAGES, content=b"{}"), 415, "invalid_request_error")
    error_of(await server.http.get(MESSAGES), 405, "invalid_request_error")
    error_of(await server.post(f"{MESSAGES}/batches", {}), 404, "not_found_error")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_full_queue_and_a_server_that_ends_ask_to_come_again(serve, streamed):
    server = await serve()
    for refusal, status, kind in (
        (QueueFull(3, 3), 429, "rate_limit_error"),
        (EngineStopped("over"), 503, "overloaded_error"),
    ):
        server.engine.refuse = refusal
        response = await server.post(MESSAGES, {**BASE, "stream": streamed})
        error_of(response, status, kind)
        assert int(response.headers["retry-after"]) > 0


async def test_a_failure_tells_nothing_of_the_inside(serve):
    def broken(request):
        raise RuntimeError("secret")

    server = await serve(script=broken)
    assert "secret" not in error_of(await server.post(MESSAGES, BASE), 500, "api_error")


async def test_a_server_that_loads_says_so(serve):
    server = await serve(loaded=False)
    error_of(await server.post(MESSAGES, BASE), 503, "overloaded_error")


async def test_fields_nobody_knows_are_named_or_refused(serve):
    body = {
        **BASE,
        "mood": "good",
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "speed": "fast",
    }
    server = await serve()
    response = await server.post(MESSAGES, body)
    assert response.status_code == 200
    assert set(response.headers["x-ignored-fields"].split(", ")) == {"mood", "context_management", "speed"}
    strict = await serve(strict_fields=True)
    assert "mood" in error_of(await strict.post(MESSAGES, body), 400, "invalid_request_error")
    del body["mood"]
    assert "context_management" in error_of(await strict.post(MESSAGES, body), 400, "invalid_request_error")


async def test_fields_that_ask_for_nothing_are_taken(serve):
    server = await serve(strict_fields=True)
    nothing = {
        "mcp_servers": [],
        "container": None,
        "speed": "standard",
        "inference_geo": None,
        "tools": [],
        "stop_sequences": [],
    }
    hints = {"cache_control": {"type": "ephemeral"}, "service_tier": "standard_only", "metadata": {"user_id": None}}
    response = await server.post(MESSAGES, {**BASE, **nothing, **hints})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"system": "x" * 5000}, anthropic.BadRequestError),
    ],
)
async def test_the_official_client_raises_its_own_errors(serve, change, kind):
    server = await serve()
    async with server.anthropic() as client:
        with pytest.raises(kind) as caught:
            await client.messages.create(**{**BASE, **change})
        assert caught.value.request_id
        assert caught.value.type in ("invalid_request_error", "not_found_error")
        assert caught.value.api_message


async def test_the_official_client_shows_its_key(serve):
    server = await serve(api_key=("none",))
    async with server.anthropic() as client:
        assert (await client.messages.create(**BASE)).content[0].text == "Hello there"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**BASE)


async def test_the_official_client_raises_what_fails_in_a_stream(serve):
    server = await serve(paused=True)
    async with server.anthropic() as client, client.messages.stream(**BASE) as stream:
        await server.engine.until(lambda: bool(server.engine.live))
        server.engine.step()
        server.engine.fail("boom")
        with pytest.raises(anthropic.APIStatusError):
            await stream.get_final_message()
