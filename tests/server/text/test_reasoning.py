"""Reasoning is split from the answer the same however the text is cut, and calls are looked for in the answer only."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.events import CodecChain
from server.text.reasoning import FAMILIES, GRANITE, MISTRAL, THINK, ReasoningCodec, ReasoningTags
from server.text.tools.registry import create
from tests.server.text.tool_samples import CALL, TOOLS, meaning

SAMPLES = [
    (THINK, False, "<think>\nHm <b>.\n\n</think>\n\nYes.", "Hm <b>.", "Yes."),
    (THINK, False, "\n<think></think>\nYes.", "", "Yes."),
    (THINK, True, "Hm.\n</think>\n\nYes </think>.\n", "Hm.", "Yes </think>.\n"),
    (THINK, True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    (THINK, True, "still at it \n", "still at it \n", ""),
    (THINK, False, " \nYes, <think> is a tag.</think>", "", " \nYes, <think> is a tag.</think>"),
    (THINK, False, "<thi", "", "<thi"),
    (MISTRAL, False, "[THINK]a[/T b[/THINK]c", "a[/T b", "c"),
    (GRANITE, False, "Here is my thought process: a\nHere is my response:\n b", "a", "b"),
    (GRANITE, False, "<think>a</think>\n<response>b</response>", "a", "b"),
    (GRANITE, False, "Here is my dog.", "", "Here is my dog."),
]
every_sample = pytest.mark.parametrize(("tags", "reasoning_open", "written", "reasoning", "text"), SAMPLES)


@every_sample
def test_a_sample_is_split_whichever_way_it_is_cut(tags: ReasoningTags, reasoning_open, written, reasoning, text):
    whole = meaning(ReasoningCodec(tags, reasoning_open=reasoning_open), [written])
    assert (whole.reasoning, whole.text) == (reasoning, text)
    assert meaning(ReasoningCodec(tags, reasoning_open=reasoning_open), list(written)) == whole
    for at in range(len(written)):
        assert meaning(ReasoningCodec(tags, reasoning_open=reasoning_open), [written[:at], written[at:]]) == whole


FRAGMENTS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<response>", "</response>", "Here is my response:", "\n", " ", "a",
    "<tool_call>", CALL, "</tool_call>", "<", "/",
]  # fmt: skip


@given(
    tags=st.sampled_from([*dict.fromkeys(FAMILIES.values())]),
    reasoning_open=st.booleans(),
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14),
    places=st.lists(st.integers(0, 400), max_size=6),
)
def test_any_text_is_split_the_same_in_any_cuts(tags, reasoning_open, fragments, places):
    written = "".join(fragments)
    bounds = [0, *sorted(place % (len(written) + 1) for place in places), len(written)]
    feeds = [written[start:stop] for start, stop in itertools.pairwise(bounds)]

    def codecs() -> CodecChain:
        return CodecChain(ReasoningCodec(tags, reasoning_open=reasoning_open), create("hermes", TOOLS))

    whole = meaning(codecs(), [written])
    assert meaning(codecs(), feeds) == whole
    assert meaning(codecs(), list(written)) == whole


def test_calls_in_reasoning_are_reasoning():
    thought = f"I could <tool_call>{CALL}</tool_call>"
    codec = CodecChain(ReasoningCodec(THINK), create("hermes", TOOLS))
    found = meaning(codec, [f"<think>{thought}</think>\n\n<tool_call>{CALL}</tool_call>"])
    assert found.reasoning == thought
    assert [name for name, _ in found.calls] == ["get_weather"]
    assert found.text == ""


@pytest.mark.parametrize(
    ("prompt", "reasoning_open"),
    [("<|im_start|>assistant\n<think>\n", True), ("assistant\n<think>\n\n</think>\n\n", False), ("assistant\n", False)],
)
def test_a_prompt_tells_whether_it_began_the_reasoning(prompt, reasoning_open):
    assert FAMILIES["qwen3"].opened_by(prompt) is reasoning_open
