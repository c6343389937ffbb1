"""A model's template gives its tool parser away. What is quoted here are the telling lines of public templates."""

from __future__ import annotations

import pytest

from server.text.reasoning import detect_reasoning
from server.text.tools.registry import ALIASES, TOOL_PARSERS, create, detect

LINES = {
    "hermes": 'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": …}',
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1",
    "llama3_json": '<|start_header_id|> format {"name": function name, "parameters": dictionary of argument name}',
    "pythonic": "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "deepseek_v3": "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n'",
    "deepseek_v31": "'<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments + '<｜tool▁call▁end｜>'",
    "harmony": '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}',
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "granite": "<|start_of_role|>system … within <tool_call></tool_call> XML tags",
    "phi4": 'formatted as functools[{"name": [function name], "arguments": …}]',
    "functiongemma": "'<start_function_call>call:' + function['name'] + '{'",
}


@pytest.mark.parametrize("tool_parser", TOOL_PARSERS)
def test_a_template_gives_its_tool_parser_away(tool_parser):
    assert detect(LINES[tool_parser]) == tool_parser


@pytest.mark.parametrize(
    ("token", "tool_parser"),
    [
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("[TOOL_CALLS]", "mistral"),
        ("<start_function_call>", "functiongemma"),
        ("<｜tool▁sep｜>", "deepseek_v31"),
    ],
)
def test_special_tokens_tell_where_a_template_does_not(token, tool_parser):
    assert detect("{{ messages }}", ["<s>", token]) == tool_parser


def test_olmo_writes_python_in_tags():
    assert detect("Output any function calls within <function_calls></function_calls> XML tags") == "pythonic"


def test_the_template_for_tools_is_the_one_that_counts():
    assert detect({"default": "{{ messages }}", "tool_use": LINES["hermes"]}) == "hermes"


@pytest.mark.parametrize("template", [None, {}, "{{ messages }}", "<|im_start|>{{ role }}"])
def test_a_model_without_calls_has_no_tool_parser(template):
    assert detect(template) is None


def test_every_alias_names_a_tool_parser():
    assert all(type(create(alias)) is TOOL_PARSERS[name] for alias, name in ALIASES.items())


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<think>' + reasoning_content + '</think>' }}", "think"),
        ("[THINK]", "mistral"),
        ("between <think></think> and write your response between <response></response>", "granite"),
        ("{{ messages }}", None),
    ],
)
def test_a_template_gives_its_reasoning_tags_away(template, family):
    assert detect_reasoning(template) == family
