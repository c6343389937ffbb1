"""How a model's answers are read is seen in its template and tokenizer, or said by flag."""

from __future__ import annotations

import pytest

from server.models.chat_format import ChatFormat
from server.models.prompt import ChatTemplate
from server.text.reasoning import GRANITE, THINK
from server.text.tools.harmony import Harmony
from server.text.tools.hermes import Hermes
from server.text.tools.mistral import Mistral
from tests.server.tiny import CHATML, EOS, tiny_tokenizer

HERMES = "{{ tools }}<tool_call>"
HARMONY = "{{ tools }}<|channel|><|message|>"


def chosen(source, *special: str, **parsers) -> ChatFormat:
    return ChatFormat.choose(source, ChatTemplate(source), tiny_tokenizer(*special), **parsers)


def test_template_and_special_tokens_tell():
    assert chosen(HERMES).tool_parser is Hermes
    assert not chosen(HERMES).prompted
    assert chosen("{{ tools }}", "[TOOL_CALLS]").tool_parser is Mistral
    assert chosen("{{ tools }}").tool_parser is None
    assert chosen(HERMES + "<think>").tags is THINK
    assert chosen(HERMES).tags is None
    assert chosen({"default": "<think>", "tool_use": HERMES}).tags is THINK


def test_where_the_template_knows_no_tools_the_system_message_tells_of_them():
    found = chosen(CHATML)
    assert (found.tool_parser, found.prompted) == (Hermes, True)
    assert chosen(CHATML, tool_parser="qwen3").prompted
    assert not chosen(CHATML, tool_parser="mistral").prompted
    assert chosen(CHATML, tool_parser="none").tool_parser is None
    assert not chosen(None).prompted


def test_channels_hold_the_reasoning_and_take_no_tags():
    found = chosen(HARMONY + "<think>")
    assert (found.tool_parser, found.tags) == (Harmony, None)
    assert chosen(HERMES, reasoning_parser="openai_gptoss").tool_parser is Harmony
    assert chosen(HARMONY, reasoning_parser="none").tool_parser is Harmony
    with pytest.raises(ValueError, match="also parses reasoning"):
        chosen(HARMONY, reasoning_parser="qwen3")
    with pytest.raises(ValueError, match="requires the tool parser harmony"):
        chosen(HERMES, tool_parser="hermes", reasoning_parser="gpt_oss")


def test_flags_win_and_a_wrong_name_tells_the_right_ones():
    assert chosen(HERMES, tool_parser="mistral").tool_parser is Mistral
    assert chosen(HERMES, reasoning_parser="granite").tags is GRANITE
    assert chosen(HERMES + "<think>", reasoning_parser="none").tags is None
    with pytest.raises(ValueError, match=r"no tool parser 'herms': choose one of .*hermes"):
        chosen(HERMES, tool_parser="herms")
    with pytest.raises(ValueError, match=r"no reasoning parser 'x': choose one of .*deepseek_r1"):
        chosen(HERMES, reasoning_parser="x")


def test_only_the_special_tokens_of_the_format_are_text():
    special = ("<tool_call>", "<think>", "</think>", "<|other|>")
    tokenizer = tiny_tokenizer(*special)
    found = chosen(HERMES + "<think>", *special)
    plain = found.output_parser([], reasoning_open=False)
    calling = found.output_parser([{"function": {"name": "f"}}], reasoning_open=False)
    assert {tokenizer.token_string(id) for id in plain.keep_ids} == {"<think>", "</think>"}
    assert {tokenizer.token_string(id) for id in calling.keep_ids} == {"<think>", "</think>", "<tool_call>"}
    assert EOS not in calling.keep_ids
    assert chosen(HERMES).output_parser([], reasoning_open=False) is None


def test_what_it_chose_can_be_read_in_the_log():
    assert str(chosen(HERMES + "<think>")) == "tool calls: hermes; reasoning: <think>"
    assert str(chosen(CHATML)) == (
        "tool calls: hermes, described in the system message because the chat template does not support tools; reasoning: none"
    )
    assert str(chosen(HARMONY)) == "tool calls: harmony; reasoning: harmony"
    assert str(chosen(None)) == "tool calls: none; reasoning: none"
