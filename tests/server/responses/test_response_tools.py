"""Tools of /v1/responses that are more than functions: namespaces, custom tools with grammars, tools that run elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.generate.custom_tools import InputReader
from server.generate.structured.chats import ChatGrammar, FunctionRule
from server.generate.structured.grammar import GrammarError, Regex, Rules
from server.generate.structured.json_quoting import quoted
from tests.server.responses.reading import both, prompt_of
from tests.server.structured.reading import accepted, reads
from tests.server.structured.test_chats import speaker
from tests.server.test_refusals import error_of
from tests.server.test_tool_calls import ROOM
from tests.server.tiny import tiny_tokenizer

CODEX = json.loads((Path(__file__).parent / "codex_first_request.json").read_text())
AGENT = {
    "type": "function",
    "name": "spawn",
    "description": "Begin an agent",
    "parameters": {"type": "object", "properties": {}},
}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents",
    "tools": [AGENT, {**AGENT, "name": "close"}],
}
SPAWN = '<tool_call>\n{"name": "agents__spawn", "arguments": {}}\n</tool_call>'
GO = {"role": "user", "content": "Go"}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files"}
# What Codex gives its models as apply_patch, in short.
PATCH_RULES = """start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Delete File: " name LF | "*** Add File: " name LF line+
name: /(.+)/
line: "+" /(.*)/ LF
%import common.LF
"""
PATCHED = '*** Begin Patch\n*** Add File: a\\"b.py\n+print("hi")\t\n*** End Patch\n'


def custom_call(name: str, text: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps({"input": text}, ensure_ascii=False)}}}\n</tool_call>'


def grammar_tool(definition: str, syntax: str = "lark") -> dict:
    return {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


# --- Codex --------------------------------------------------------------------------------------------------------


async def test_the_first_request_of_codex_is_answered(serve):
    """As @openai/codex 0.169.0 sent it, its texts shortened."""
    server = await serve("Hi!", max_model_len=16 * ROOM)
    body = {**CODEX, "model": "tiny"}
    answer = await server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    ignored = answer.headers["x-ignored-fields"].split(", ")
    assert {"tools.web_search", "client_metadata"} <= set(ignored)
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
    assert "multi_agent_v1__spawn_agent" in prompt
    assert "web_search" not in prompt
    assert answer.text.rstrip().splitlines()[-1].startswith('data: {"type":"response.completed"')


# --- namespaces ---------------------------------------------------------------------------------------------------


async def test_a_call_into_a_namespace_is_named_as_the_client_knows_it(serve):
    server = await serve(SPAWN, max_model_len=ROOM)
    body = await both(server, tools=[NAMESPACE])
    (call,) = body["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "spawn")
    assert body["tools"] == [NAMESPACE]
    prompt = await prompt_of(
        server, tools=[NAMESPACE],
        input=[GO, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}],
    )  # fmt: skip
    assert prompt.count("agents__spawn") == 2
    assert prompt.count("Other agents") == 1


async def test_the_official_client_reads_and_continues_a_call_into_a_namespace(serve):
    server = await serve(SPAWN, max_model_len=ROOM)
    client = server.openai()
    first = await client.responses.create(model="tiny", input="Go", tools=[NAMESPACE])
    call = first.output[0]
    assert (call.type, call.namespace, call.name) == ("function_call", "agents", "spawn")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    again = await client.responses.create(
        model="tiny", input=[result], tools=[NAMESPACE], previous_response_id=first.id
    )
    assert again.status == "completed"


@pytest.mark.parametrize("choice", [
    {"type": "function", "name": "spawn"}, {"type": "function", "name": "spawn", "namespace": "agents"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "agents"}]},
])  # fmt: skip
async def test_a_tool_of_a_namespace_can_be_chosen(serve, choice):
    server = await serve(SPAWN, max_model_len=ROOM)
    time = {"type": "function", "name": "time"}
    assert (await server.respond(tools=[NAMESPACE, time], tool_choice=choice)).status_code == 200
    (make,) = server.engine.submitted[-1].params.matchers
    encode = server.tokenizer.encode
    assert reads(make(), encode(SPAWN, add_special_tokens=False))
    assert not reads(make(), encode(SPAWN.replace("agents__spawn", "time"), add_special_tokens=False))


# --- those that run elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["web_search", "mcp", "local_shell", "apply_patch", "code_interpreter", "tool_search"])
async def test_tools_that_run_elsewhere_are_left_out_and_named(serve, kind):
    server = await serve()
    answer = await server.respond(tools=[{"type": kind, "server_label": "x"}, {"type": kind}], tool_choice="auto")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == f"tools.{kind}"
    assert answer.json()["tools"] == []
    strict = await serve(strict_fields=True)
    assert error_of(await strict.respond(tools=[{"type": kind}]), 400)["param"] == f"tools.{kind}"


async def test_one_that_would_have_to_be_called_is_refused_by_its_kind(serve):
    server = await serve()
    error = error_of(await server.respond(tools=[{"type": "web_search"}], tool_choice="required"), 400)
    assert error["param"] == "tools[0].type"
    assert error["message"] == "tools[0] of type 'web_search' is not supported by this server; use a function instead"


# --- custom tools -------------------------------------------------------------------------------------------------


async def test_a_custom_tool_is_called_with_a_text(serve):
    server = await serve(custom_call("patch", PATCHED), max_model_len=ROOM)
    body = await both(server, tools=[PATCH])
    (call,) = body["output"]
    assert (call["type"], call["name"], call["input"], call["status"]) == (
        "custom_tool_call",
        "patch",
        PATCHED,
        "completed",
    )
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"}
    prompt = await prompt_of(server, tools=[PATCH], input=[{"role": "user", "content": "Go"}, call, result])
    assert json.dumps({"input": PATCHED}) in prompt
    assert "Done" in prompt


async def test_the_official_client_streams_the_input_of_a_custom_tool(serve):
    server = await serve(custom_call("patch", PATCHED), max_model_len=ROOM)
    stream = await server.openai().responses.create(model="tiny", input="Go", tools=[PATCH], stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCHED
    assert len(deltas) > 5
    assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [PATCHED]


async def test_a_stored_custom_call_can_be_continued(serve):
    server = await serve(custom_call("patch", PATCHED), max_model_len=ROOM)
    first = (await server.respond(tools=[PATCH])).json()
    result = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "Done"}
    answer = await server.respond(tools=[PATCH], input=[result], previous_response_id=first["id"])
    assert answer.status_code == 200, answer.text
    missing = await server.respond(input=[{**result, "call_id": "nobody"}])
    assert "No tool call found for custom tool call output" in error_of(missing, 400)["message"]


@pytest.mark.parametrize(
    ("tool", "taken", "refused"),
    [
        (grammar_tool(PATCH_RULES), PATCHED, "print('hi')"),
        (grammar_tool("[a-z]+\\n[0-9]{2}", "regex"), "ab\n12", "ab\n1"),
    ],
)
async def test_a_custom_tool_with_a_grammar_holds_the_model_to_it(serve, tool, taken, refused):
    server = await serve(custom_call("patch", taken), max_model_len=ROOM)
    call = (await both(server, tools=[tool]))["output"][0]
    assert call["input"] == taken
    (make,) = server.engine.submitted[-1].params.matchers
    encode = server.tokenizer.encode
    assert reads(make(), encode(custom_call("patch", taken), add_special_tokens=False))
    assert not reads(make(), encode(custom_call("patch", refused), add_special_tokens=False))
    assert reads(make(), encode("Only a text", add_special_tokens=False))
    forced = {"type": "custom", "name": "patch"}
    assert (await server.respond(tools=[tool], tool_choice=forced)).status_code == 200
    (make,) = server.engine.submitted[-1].params.matchers
    assert not reads(make(), encode("Only a text", add_special_tokens=False))


@pytest.mark.parametrize("dialect", ["hermes", "qwen3_coder", "glm45", "pythonic", "mistral", "llama3_json"])
async def test_a_grammar_holds_in_every_way_to_write_calls(dialect):
    tokenizer = speaker(dialect)
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    rules = ChatGrammar(dialect, (FunctionRule("patch", schema, Rules(PATCH_RULES)),), must_call=True, several=False)
    pattern = ChatGrammar(dialect, (FunctionRule("patch", schema, Regex("[a-z]+")),), must_call=True, several=False)
    assert await accepted(rules, "x", tokenizer=tokenizer) == set()
    assert await accepted(pattern, "x", tokenizer=tokenizer) == set()


async def test_a_grammar_that_cannot_be_read_is_refused_by_name(serve):
    server = await serve(max_model_len=ROOM)
    error = error_of(await server.respond(tools=[grammar_tool("start: missing_rule")], tool_choice="required"), 400)
    assert error["param"] == "tool_choice"
    assert "missing_rule" in error["message"]
    assert not server.engine.submitted


# --- what is inside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "plain", 'quote " and \\ and /', "ä\n\t\u2028😀\x00\x7f", '"'])
@pytest.mark.parametrize("ascii", [True, False])
def test_the_input_is_the_same_however_its_arguments_come(text, ascii):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    for size in (1, 2, 3, len(arguments)):
        reader = InputReader()
        pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join([*pieces, reader.end()]) == text


def test_arguments_that_are_others_are_the_input_as_they_are():
    for arguments in ('{"patch": "x"}', '{"input": 5}', "{}"):
        reader = InputReader()
        assert reader.feed(arguments) + reader.end() == arguments


@pytest.mark.parametrize(
    ("lark", "taken", "refused"),
    [
        ('start: "a\\n" /[^x]/', ['a\n"', "a\n\n", "a\nä"], ["a\nx", "a"]),
        ("start: /./", ["a", '"', "\\", "\t", "😀"], ["\n", ""]),
        ("start: /(?s:.)/ | /\\w+\\s/", ["\n", "ab ", "ab\t"], ["-- "]),
        ('start: "q\\"x"i A*\nA: "0".."3"', ['Q"x01', 'q"X'], ['q"x4']),
        ("start: INT | WS\n%import common.INT\n%import common.WS -> WS", ["12", " \n"], ["a"]),
        ("start: /[^\\d\\n]{2,3}?/ // a comment", ["ab", 'a"b'], ["1a", "a\n"]),
        ('start: /a\\/b|c"/', ["a/b", 'c"'], ["c"]),
    ],
)
async def test_a_quoted_grammar_takes_what_the_grammar_takes_as_json_writes_it(lark, taken, refused):
    plain = await accepted(Rules(lark), *taken, *refused)
    written = {json.dumps(text, ensure_ascii=False)[1:-1]: text for text in (*taken, *refused)}
    inside = await accepted(Rules(quoted(lark)), *written)
    assert {written[text] for text in inside} == plain == set(taken)


@pytest.mark.parametrize(
    "lark", ["start: <think>", "start: %json {}", "start: @other", "start: /(?=a)/", "start: /a/q", "%import x.Y"]
)
def test_what_has_no_place_in_a_json_string_is_refused(lark):
    with pytest.raises(GrammarError):
        quoted(lark)


async def test_users_who_speak_twice_are_one_where_the_template_wants_that(serve):
    strict = (
        "{% for m in messages %}{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('alternate!') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    server = await serve(speaks=tiny_tokenizer(chat_template=strict))
    twice = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    assert await prompt_of(server, input=twice) == "<user>One\n\nTwo"
