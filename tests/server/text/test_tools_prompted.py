"""Tools told in messages: the conversation keeps its roles, its order and its text."""

from __future__ import annotations

import json

from server.text.tools.prompted import TOOL_PARSER, with_tools
from tests.server.text.tool_samples import PARIS, TOOLS, meaning

USER = {"role": "user", "content": "Hi"}


def call(name: str, arguments) -> dict:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_stand_in_the_system_message_that_is_there_or_in_a_new_one():
    for first in (
        [],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}],
    ):
        system, *rest = with_tools([*first, USER], TOOLS)
        assert system["role"] == "system"
        assert system["content"].startswith("Be brief.\n\n#" if first else "#")
        assert all(json.dumps(tool) in system["content"] for tool in TOOLS)
        assert rest == [USER]


def test_without_tools_only_history_is_rewritten():
    assert with_tools([USER], []) == [USER]


def test_calls_of_earlier_turns_are_written_as_the_tool_parser_reads_them():
    for arguments in (PARIS, json.dumps(PARIS)):
        message = {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [call("get_weather", arguments), call("time", "")],
        }
        (seen,) = with_tools([message], [])
        assert seen.keys() == {"role", "content"}
        found = meaning(TOOL_PARSER(TOOLS), [seen["content"]])
        assert found.text == "Well."
        assert [name for name, _ in found.calls] == ["get_weather", "time"]
        assert [json.loads(each) for each in found.arguments] == [PARIS, {}]


def test_results_that_follow_each_other_are_one_turn_of_the_user():
    results = [{"role": "tool", "tool_call_id": str(n), "content": f"r{n}"} for n in range(3)]
    seen = with_tools([USER, *results[:2], {"role": "assistant", "content": "a"}, results[2]], [])
    assert [message["role"] for message in seen] == ["user", "user", "assistant", "user"]
    assert seen[1]["content"] == "<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response>"
    assert seen[3]["content"] == "<tool_response>\nr2\n</tool_response>"
    assert results[0] == {"role": "tool", "tool_call_id": "0", "content": "r0"}
