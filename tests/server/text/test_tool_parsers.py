"""Tool calls come out of the text the same however it is cut, and nothing a model writes is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.tools.registry import TOOL_PARSERS, create
from tests.server.text.tool_samples import CALL, KIMI, SAMPLES, TOOLS, V3, V31, Sample, meaning

ids = [f"{sample.tool_parser}-{at}" for at, sample in enumerate(SAMPLES)]
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=ids)
every_tool_parser = pytest.mark.parametrize("tool_parser", TOOL_PARSERS)

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|tool_call|>", "functools[", "[TOOL_CALLS]", "[ARGS]", "<function=", "<parameter=",
    "</parameter>", "</function>", "get_weather", "time", "city", ">", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<function_calls>", "</function_calls>", "<start_function_call>", "call:", "<escape>",
    "<end_function_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", " to=functions.time", "analysis", "<|python_tag|>",
    "{", "}", "[", "]", "(", ")", "=", ":", ",", '"', "'", "\\", "\n", " ", "a", "é", "1", "true", '{"name": "time"}', CALL,
    V3.format("time", "{}"), V31.format("time", '{"a": 1}'), KIMI.format("time", 0, "{}"), "time(a=1)", "<think>", "</think>",
]  # fmt: skip


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(bounds)]


@every_sample
def test_a_sample_means_what_the_model_meant(sample: Sample):
    found = meaning(create(sample.tool_parser, TOOLS), [sample.written])
    assert not found.malformed
    assert (found.text, found.reasoning) == (sample.text, sample.reasoning)
    assert [name for name, _ in found.calls] == [name for name, _ in sample.calls]
    assert [json.loads(arguments) for arguments in found.arguments] == [arguments for _, arguments in sample.calls]


@every_sample
def test_every_cut_in_two_and_every_character_alone_mean_the_same(sample: Sample):
    whole = meaning(create(sample.tool_parser, TOOLS), [sample.written])
    assert meaning(create(sample.tool_parser, TOOLS), list(sample.written)) == whole
    for at in range(len(sample.written)):
        assert meaning(create(sample.tool_parser, TOOLS), [sample.written[:at], sample.written[at:]]) == whole


@every_sample
@given(places=st.lists(st.integers(0, 2000), max_size=12))
@settings(max_examples=30)
def test_any_cuts_mean_the_same(sample: Sample, places):
    whole = meaning(create(sample.tool_parser, TOOLS), [sample.written])
    assert meaning(create(sample.tool_parser, TOOLS), cut(sample.written, places)) == whole


@every_sample
def test_a_sample_cut_off_anywhere_loses_nothing(sample: Sample):
    for size in range(len(sample.written)):
        written = sample.written[:size]
        found = meaning(create(sample.tool_parser, TOOLS), [written])
        assert meaning(create(sample.tool_parser, TOOLS), list(written)) == found
        broken = {index for index, _ in found.malformed}
        for index, arguments in enumerate(found.arguments):
            if index in broken:
                continue
            json.loads(arguments)
        if not found.calls and not found.reasoning and sample.tool_parser != "harmony":
            assert found.text == written
        for _, raw in found.malformed:
            assert raw
            assert raw in written


@every_tool_parser
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=24),
    places=st.lists(st.integers(0, 2000), max_size=6),
)
def test_whatever_a_model_writes_means_the_same_in_any_cuts(tool_parser, fragments, places):
    written = "".join(fragments)
    whole = meaning(create(tool_parser, TOOLS), [written])
    assert meaning(create(tool_parser, TOOLS), cut(written, places)) == whole
    assert meaning(create(tool_parser, TOOLS), list(written)) == whole
    broken = {index for index, _ in whole.malformed}
    for index, arguments in enumerate(whole.arguments):
        assert index in broken or isinstance(json.loads(arguments), dict)
    if not whole.calls and not whole.reasoning and tool_parser != "harmony":
        assert whole.text == written


@pytest.mark.parametrize("end", ["<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"])
def test_white_space_behind_what_is_no_call_is_text(end):
    written = f"<｜tool▁call▁begin｜>\n{end}"
    found = meaning(create("deepseek_v3", TOOLS), list(written))
    assert (found.text, found.calls) == (written, [])


@every_sample
def test_only_beginnings_of_markers_wait(sample: Sample):
    """So no delta is searched again: the work per character does not grow with the text."""
    codec = create(sample.tool_parser, TOOLS)
    for char in sample.written:
        codec.feed(char)
        assert codec.source.num_pending < 40


@every_tool_parser
@pytest.mark.parametrize("nesting", ["[", '{"a":', "{'a':", "(", "{a:"])
def test_deep_nesting_breaks_the_call_and_nothing_else(tool_parser, nesting):
    beginnings = {
        "hermes": '<tool_call>{"name": "time", "arguments": ', "granite": '<tool_call>{"name": "time", "arguments": ',
        "phi4": 'functools[{"name": "time", "arguments": ', "mistral": "[TOOL_CALLS]time[ARGS]",
        "llama3_json": '{"name": "time", "parameters": ', "pythonic": "[time(a=", "harmony": " to=time<|message|>",
        "qwen3_coder": "<function=get_weather><parameter=where>", "functiongemma": "<start_function_call>call:time{a:",
        "glm45": "<tool_call>get_weather<arg_key>where</arg_key><arg_value>",
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n",
        "deepseek_v31": "<｜tool▁call▁begin｜>time<｜tool▁sep｜>",
        "kimi_k2": "<|tool_call_begin|>time<|tool_call_argument_begin|>",
    }  # fmt: skip
    end = "</parameter></function>" if tool_parser == "qwen3_coder" else "</arg_value></tool_call>"
    found = meaning(create(tool_parser, TOOLS), [beginnings[tool_parser] + nesting * 3000 + end])
    if tool_parser in ("qwen3_coder", "glm45"):
        assert json.loads(found.arguments[0]) == {"where": nesting * 3000}
    else:
        assert len(found.malformed) == len(found.calls)
        assert nesting * 3000 in found.text + "".join(raw for _, raw in found.malformed)


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("3", {"type": "number"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("3", {"type": "string"}, "3"),
        ("3", {}, 3),
        ("three", {"type": "integer"}, "three"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("3", {"type": ["string", "null"]}, "3"),
        ("{'a': [1, 'b']}", {"type": "object"}, {"a": [1, "b"]}),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": 1}),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ('say "hi"', None, 'say "hi"'),
    ],
)
def test_a_bare_value_becomes_what_its_schema_allows(written, schema, value):
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": schema} if schema is not None else {}}}}
    written = f"<tool_call>f<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>"
    assert json.loads(meaning(create("glm45", [tool]), [written]).arguments[0]) == {"x": value}


def test_arguments_stream_while_they_arrive():
    codec = create("hermes", TOOLS)
    codec.feed('<tool_call>{"name": "time", "arguments": {"a": "')
    (event,) = codec.feed("abc")
    assert (event.index, event.text) == (0, "abc")


def test_a_string_parameter_streams_as_the_inside_of_a_json_string():
    codec = create("qwen3_coder", TOOLS)
    codec.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    (event,) = codec.feed('a"b')
    assert event.text == 'a\\"b'


def test_text_goes_out_at_once_but_for_what_may_become_a_marker():
    codec = create("hermes", TOOLS)
    assert [event.text for event in codec.feed("a < b, <tool")] == ["a < b,"]
    assert [event.text for event in codec.feed("box>")] == [" <toolbox>"]


def test_a_call_broken_before_its_name_is_text():
    found = meaning(create("hermes", TOOLS), [f"<tool_call>oops</tool_call> <tool_call>{CALL}</tool_call>"])
    assert found.text == "<tool_call>oops</tool_call>"
    assert [name for name, _ in found.calls] == ["get_weather"]


def test_a_call_broken_later_is_reported_with_all_that_was_written_and_the_next_one_stands():
    broken = '<tool_call>{"name": "time", "arguments": {"a": nope}}</tool_call>'
    found = meaning(create("hermes", TOOLS), [f"{broken}\n<tool_call>{CALL}</tool_call>"])
    assert found.malformed == [(0, broken)]
    assert [name for name, _ in found.calls] == ["time", "get_weather"]
    assert found.arguments[1] in CALL
    assert found.text == ""


def test_kimi_calls_keep_the_ids_the_model_gave_them():
    found = meaning(create("kimi_k2", TOOLS), [KIMI.format("time", 7, "{}")])
    assert found.calls == [("time", "functions.time:7")]


def test_a_bare_json_answer_is_no_call_unless_it_names_a_tool():
    assert meaning(create("llama3_json", []), [CALL]).text == CALL


def test_an_unknown_tool_parser_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="hermes"):
        create("klingon")
