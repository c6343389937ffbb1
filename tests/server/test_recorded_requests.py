"""Requests of agents in the middle of their work, recorded here with their texts shortened and most of their tools left out: Claude
Code 2.1.197 and opencode 1.18.33, after a command was run. Open WebUI 0.12.4's is written by hand,
as its converter for Ollama makes them. Codex' first one is in responses/test_response_tools.py."""

from __future__ import annotations

import json
from pathlib import Path

from tests.server.test_tool_calls import ROOM

RECORDED = Path(__file__).parent / "recorded"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
ARGUMENTS = '{"command": "ls", "description": "Lists"}'


def recorded(name: str) -> dict:
    return json.loads((RECORDED / name).read_text())


def prompt_of(server) -> str:
    return server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)


async def test_claude_code_goes_on_after_a_command(serve):
    body = recorded("claude_code.json")
    server = await serve(CALL.format("Bash", ARGUMENTS), max_model_len=8 * ROOM)
    stream = await server.post("/v1/messages?beta=true", body)
    assert stream.status_code == 200, stream.text
    assert stream.headers["x-ignored-fields"] == "x-anthropic-billing-header, output_config.effort, thinking"
    assert "event: content_block_start" in stream.text
    assert '"stop_reason":"tool_use"' in stream.text
    prompt = prompt_of(server)
    assert "cc_version" not in prompt
    (result,) = (
        part["content"] for message in body["messages"] if isinstance(message["content"], list)
        for part in message["content"] if part["type"] == "tool_result"
    )  # fmt: skip
    assert result in prompt
    whole = (await server.post("/v1/messages?beta=true", {**body, "stream": False})).json()
    assert whole["content"][0]["input"] == json.loads(ARGUMENTS)
    counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
    count = (await server.post("/v1/messages/count_tokens?beta=true", counted)).json()["input_tokens"]
    assert count == len(server.engine.submitted[-1].prompt_ids)


async def test_claude_code_looks_whether_somebody_is_there(serve):
    server = await serve()
    assert (await server.http.head("/")).status_code == 200


async def test_opencode_goes_on_after_a_command(serve):
    body = recorded("opencode.json")
    server = await serve(CALL.format("bash", ARGUMENTS), max_model_len=8 * ROOM)
    stream = await server.post("/v1/chat/completions", body)
    assert stream.status_code == 200, stream.text
    assert "x-ignored-fields" not in stream.headers
    events = [json.loads(event.removeprefix("data: ")) for event in stream.text.split("\n\n")[:-2]]
    assert events[-1]["usage"]["total_tokens"] > 0
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert body["messages"][-1]["content"] in prompt_of(server)


async def test_open_webui_goes_on_after_a_tool_over_ollamas_api(serve):
    body = recorded("open_webui.json")
    server = await serve("Sunny it is.", max_model_len=ROOM)
    stream = await server.post("/api/chat", body)
    assert stream.status_code == 200, stream.text
    assert "x-ignored-fields" not in stream.headers
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Sunny it is."
    assert lines[-1]["done_reason"] == "stop"
    prompt = prompt_of(server)
    assert '{"city": "Rome"}' in prompt
    assert "It is sunny." in prompt
