"""What events add up to: parts in order, and nothing of a broken call lost."""

from __future__ import annotations

from server.generate.transcript import Transcript, TranscriptCall
from server.text.events import Malformed, Reasoning, Text, ToolArguments, ToolCallStart


def said(*events) -> Transcript:
    transcript = Transcript()
    for event in events:
        transcript.add([event])
    return transcript


def test_pieces_of_a_kind_become_one_part_and_parts_keep_their_order():
    events = [
        Reasoning("h"), Reasoning("m"), Text("a"), ToolCallStart(0, "f", "1"), ToolArguments(0, "{"), ToolArguments(0, "}"),
        ToolCallStart(1, "g", "2"), ToolArguments(1, "{}"), Text("b"), Text("c"),
    ]  # fmt: skip
    whole = said(*events)
    assert whole.parts == [
        Reasoning("hm"),
        Text("a"),
        TranscriptCall("1", "f", "{}"),
        TranscriptCall("2", "g", "{}"),
        Text("bc"),
    ]
    assert (whole.text, whole.reasoning) == ("abc", "hm")
    assert whole.calls == [TranscriptCall("1", "f", "{}"), TranscriptCall("2", "g", "{}")]


def test_a_broken_call_is_text_where_it_stood():
    whole = said(
        Text("a"),
        ToolCallStart(0, "f", "1"),
        ToolArguments(0, "{"),
        Malformed(0, "<f {"),
        Text("b"),
        ToolCallStart(1, "g", "2"),
    )
    assert whole.parts == [Text("a<f {b"), TranscriptCall("2", "g", "")]


def test_nothing_said_is_nothing():
    assert (Transcript().parts, Transcript().text) == ([], "")
