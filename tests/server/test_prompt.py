"""Chat templates render as transformers renders them, refuse with words, and cannot leave their sandbox."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
import transformers

from server.models.prompt import ChatTemplate, PromptError
from tests.server.text.made_tokenizers import gemma_like

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- set today = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + today + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\n' + reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {% generation %}{{- content }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function %}
            {{- '\n<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) ~ '}' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
PARTS = """{% for message in messages %}
<{{ message.role }}>
    {% for part in message.content %}
        {% if part.type == 'text' %}
{{ part.text }}
        {% endif %}
    {% endfor %}
{% endfor %}
"""
EITHER = (
    "{%- macro render_content(content) -%}{%- if content is string -%}s:{{ content }}{%- else -%}"
    "{%- for item in content -%}p:{{ item.text }};{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for message in messages -%}{{ render_content(message.content) }}{%- endfor -%}"
)

USER = [{"role": "user", "content": "Grüße <b>&amp; 'x'"}]
TALK = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "a\n\n b"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "tool_calls": None},
    {"role": "user", "content": "漢字 😀"},
]
CALL = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"städte": ["Köln"], "n": 1}}}
        ],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
]
REASONED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": "because"}]
TOOLS = [
    {"type": "function", "function": {"name": "now", "description": "Grüße <é>", "parameters": {"type": "object"}}}
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=gemma_like(), **NAMED)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "tools", "extra"),
    [
        (SMOLLM2, USER, None, {}),
        (SMOLLM2, TALK, None, {}),
        (LLAMA3, USER, None, {}),
        (LLAMA3, TALK, TOOLS, {}),
        (LLAMA3, CALL, TOOLS, {}),
        (QWEN3, TALK, None, {"enable_thinking": False}),
        (QWEN3, CALL, TOOLS, {}),
        (QWEN3, REASONED, None, {}),
        (MISTRAL, USER, None, {}),
        (MISTRAL, USER, None, {"bos_token": "<other>"}),
        (
            PARTS,
            [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
            None,
            {},
        ),
        (EITHER, USER, None, {}),
        (EITHER, [{"role": "user", "content": [{"type": "text", "text": "one"}]}], None, {}),
    ],
)
def test_templates_render_as_transformers_renders_them(theirs, template, messages, tools, extra, generate):
    expected = theirs.apply_chat_template(
        messages, chat_template=template, tools=tools, tokenize=False, add_generation_prompt=generate, **extra
    )
    rendered = ChatTemplate(template, NAMED).render(messages, tools=tools, add_generation_prompt=generate, **extra)
    assert rendered == expected


def test_the_date_in_a_prompt_is_the_clocks():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


def test_a_template_is_rendered_the_same_twice_and_changes_nothing_it_was_given():
    template = ChatTemplate(LLAMA3, NAMED)
    before = repr(CALL)
    assert template.render(CALL, tools=TOOLS) == template.render(CALL, tools=TOOLS)
    assert repr(CALL) == before


# --- the form of content ------------------------------------------------------------------------------------------

IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


def test_parts_become_one_string_for_templates_that_want_strings():
    assert ChatTemplate("{{ messages[0].content }}").render(IN_PARTS) == "one\ntwo"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }};{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set body = m.content %}{% for c in body %}{{ c.text }};{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.content | selectattr('text') %}{{ c.text }};{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.content[0:] %}{{ c.text }};{% endfor %}{% endfor %}",
        "{{ messages[0].content[0].text }};{{ messages[0]['content'][1:][0]['text'] if messages[0].content|length > 1 }};",
    ],
)
def test_templates_that_go_through_parts_get_parts_and_strings_as_one(template):
    assert ChatTemplate(template).render(IN_PARTS) == "one;two;"
    assert ChatTemplate(template).render([{"role": "user", "content": "one"}]).startswith("one;")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for line in m.content.split('o') %}{{ line }}|{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{% endfor %}{{ m.content }}{% endfor %}",
        "{% for content in messages %}{{ content.content }}{% endfor %}",
    ],
)
def test_loops_over_other_things_do_not_make_a_template_want_parts(template):
    assert "ne" in ChatTemplate(template).render([{"role": "user", "content": "one"}])
    assert "ne" in ChatTemplate(template).render([{"role": "user", "content": [{"type": "text", "text": "one"}]}])


def test_nulls_are_missing_keys_as_templates_expect():
    template = ChatTemplate("{% for m in messages %}{{ 'tool_calls' in m }}{{ m.content is defined }}{% endfor %}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": None}]) == "FalseFalse"


def test_tool_call_arguments_sent_as_json_become_the_object_templates_write():
    template = ChatTemplate("{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"städte":["Köln"]}'}}]}
    assert template.render([call]) == '{"städte": ["Köln"]}'
    call["tool_calls"] = [{"function": {"name": "f", "arguments": ""}}]
    assert template.render([call]) == "{}"
    call["tool_calls"] = [{"function": {"name": "f", "arguments": "not json"}}]
    assert template.render([call]) == '"not json"'


def test_arguments_that_are_nested_too_deeply_stay_text():
    template = ChatTemplate("{% for c in messages[0].tool_calls %}{{ c.function.arguments }}{% endfor %}")
    deep = "[" * 100_000
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    assert template.render([call]) == deep


def test_arguments_reach_a_template_that_joins_them_to_text_as_json():
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '```' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"städte":["Köln"]}'}}]}
    assert template.render([call]) == '```{"städte":["Köln"]}'
    call["tool_calls"] = [{"function": {"name": "f", "arguments": {"n": "ö"}}}]
    assert template.render([call]) == '```{"n": "ö"}'


def test_arguments_reach_a_template_that_writes_whatever_it_gets_as_json_too():
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert template.render([call]) == '{"a": 1}'


def test_a_message_of_calls_alone_has_empty_content_since_templates_add_to_it():
    template = ChatTemplate("{% for m in messages %}{{ m.content + '!' }}{{ m.tool_calls is defined }}{% endfor %}")
    assert (
        template.render(
            [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]
        )
        == "!True"
    )


# --- going on -----------------------------------------------------------------------------------------------------

PREFILLED = [*USER, {"role": "assistant", "content": "Once upon a "}]


@pytest.mark.parametrize("template", [SMOLLM2, QWEN3, EITHER, PARTS])
def test_a_continued_message_ends_the_prompt_with_its_content(template):
    text = ChatTemplate(template, NAMED).render(PREFILLED, continue_final=True)
    assert text.endswith("Once upon a ")
    parts = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two "}]},
    ]
    assert ChatTemplate(template, NAMED).render(parts, continue_final=True).endswith("Two ")


@pytest.mark.parametrize("template", [SMOLLM2, QWEN3, LLAMA3])
def test_it_continues_as_transformers_does(theirs, template):
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, continue_final_message=True)
    assert ChatTemplate(template, NAMED).render(messages, continue_final=True) == expected


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it():
    with pytest.raises(PromptError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}").render(PREFILLED, continue_final=True)


def test_a_template_tells_what_it_reads():
    template = ChatTemplate(
        {"default": "{% if tools %}{% endif %}", "tool_use": "{% set tools = none %}{{ enable_thinking }}"}
    )
    assert template.reads("tools")
    assert template.reads("x", "tools")
    assert not template.reads("enable_thinking")
    assert template.reads("enable_thinking", with_tools=True)
    assert not template.reads("tools", with_tools=True)
    assert not ChatTemplate(None).reads("tools")


# --- which template -----------------------------------------------------------------------------------------------


def test_the_template_for_tools_is_taken_where_there_are_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=TOOLS) == "tools"
    assert ChatTemplate("only").render(USER, tools=TOOLS) == "only"


def test_a_model_without_a_template_says_what_to_do():
    for source in (None, {}):
        template = ChatTemplate(source)
        assert not template
        with pytest.raises(PromptError, match=r"/v1/completions.*--chat-template"):
            template.render(USER)
    with pytest.raises(PromptError, match=r"rag, tool_use.*--chat-template"):
        ChatTemplate({"tool_use": "t", "rag": "r"}).render(USER)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (MISTRAL, [{"role": "assistant", "content": "hi"}], "^Conversation roles must alternate"),
        (SMOLLM2, [], "empty"),
        ("{{ messages[0].nothing.at_all }}", USER, "fails on these messages: UndefinedError"),
        ("{{ 1 / 0 }}", USER, "ZeroDivisionError"),
        ("{{ messages[0] | no_such_filter }}", USER, "no_such_filter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", USER, "RecursionError"),
        ("{{ range(10**9) | length }}", USER, "Range too big"),
    ],
)
def test_what_a_template_refuses_or_breaks_on_is_a_prompt_error(template, messages, says):
    with pytest.raises(PromptError, match=says):
        ChatTemplate(template, NAMED).render(messages)


def test_a_broken_template_names_its_line():
    with pytest.raises(PromptError, match="'default' is broken, line 2"):
        ChatTemplate("ok\n{% for %}")


def test_variables_of_a_request_cannot_replace_the_messages():
    with pytest.raises(PromptError, match="may not replace the messages"):
        ChatTemplate(SMOLLM2).render(USER, messages=[])
    assert ChatTemplate("{{ self_made }}").render(USER, self_made="x", unread=1, self=2) == "x"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__ }}",
        "{{ lipsum.__globals__['os'].popen('id') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{% set _ = messages.append({'role': 'user', 'content': 'x'}) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_template_gets_nothing(template):
    try:
        rendered = ChatTemplate(template, NAMED).render(USER)
    except PromptError:
        return
    assert rendered == ""  # what may not be touched is undefined
