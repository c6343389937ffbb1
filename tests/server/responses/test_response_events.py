"""ResponseEvents: whatever a model writes becomes items, and however its tokens arrive the response is the same."""

from __future__ import annotations

import json
from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import encode

from runtime.api import FinishReason, Output, Request, SamplingParams
from server.api.frames import named_event
from server.api.responses.api_types import Response, ResponseReasoning, ResponseText
from server.api.responses.events import ResponseEvents, ResponseStart
from server.generate.generation import Generation, TextOptions
from server.models.chat_format import ChatFormat, OutputParser
from server.models.defaults import sampling_defaults
from server.models.model import LoadedModel
from server.models.prompt import ChatTemplate
from tests.fakes import FakeEngine, fake_logprobs, fake_model
from tests.server.responses.reading import both, frames, without_ids
from tests.server.test_tool_calls import ROOM, every_sample, speaker
from tests.server.text.tool_samples import SAMPLES, TOOLS, Sample
from tests.server.tiny import EOS, loaded_model

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def texts(body, kind):
    parts = [part["text"] for item in body["output"] if item["type"] == kind for part in item["content"]]
    return "".join(parts)


@every_sample
async def test_every_tool_parser_comes_out_as_items_whole_and_streamed(serve, sample: Sample):
    server = await serve(
        sample.written,
        speaks=speaker(sample.tool_parser, special=True),
        tool_parser=sample.tool_parser,
        max_model_len=ROOM,
    )
    body = await both(server, tools=FUNCTIONS)
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    made = [item for item in calls if item["status"] == "completed"]
    assert [(item["name"], json.loads(item["arguments"])) for item in made] == sample.calls
    assert texts(body, "message") == sample.text
    assert texts(body, "reasoning") == sample.reasoning
    assert all(item["call_id"] for item in calls)


@cache
def loaded(tool_parser: str) -> LoadedModel:
    tokenizer = speaker(tool_parser, special=True)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens)
    chat_format = ChatFormat.choose(tokenizer.chat_template, template, tokenizer, tool_parser=tool_parser)
    engine = FakeEngine(model=fake_model(vocab_size=tokenizer.vocab_size, eos_token_ids=frozenset({EOS})))
    return loaded_model(engine, tokenizer, template, sampling_defaults(), ("tiny",), chat_format)


class Unstoppable:
    def stop(self, index: int) -> None:
        raise AssertionError("nothing here stops before its time")


def narrated(sample: Sample, sizes: list[int], *, logprobs: bool, cut: int | None = None):
    """The final response of `sample`, whose tokens arrive so many at a time, checked as a stream."""
    there = loaded(sample.tool_parser)
    ids = [*there.tokenizer.encode(sample.written), EOS][:cut]
    finish = FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH
    output_parser: OutputParser | None = there.chat_format.output_parser(TOOLS, reasoning_open=False)
    params = SamplingParams(max_tokens=10_000, logprobs=1 if logprobs else None)
    request = Request("r", [1], params)
    generation = Generation(there, [request], 1, 1, TextOptions(output_parser=output_parser, logprobs=params.logprobs))
    response_events = ResponseEvents(ResponseStart(EMPTY), generation, in_background=False)
    emitted, at = response_events.begin(), 0
    while at < len(ids):
        part = ids[at : at + max(1, sizes[at % len(sizes)])]
        at += len(part)
        found = [fake_logprobs(id, request) for id in part] if logprobs else None
        emitted += response_events.feed(Output(0, part, finish if at == len(ids) else None, logprobs=found))
    emitted += response_events.end()
    assert [event.sequence_number for event in emitted] == list(range(len(emitted)))
    events = frames(b"".join(map(named_event, emitted)).decode())
    assert events[-1]["response"] == json.loads(encode(response_events.body))
    return events[-1]["response"]


EMPTY = Response(
    id="resp_1",
    created_at=0,
    model="tiny",
    reasoning=ResponseReasoning(None),
    text=ResponseText({}),
    temperature=1.0,
    top_p=1.0,
)


@given(st.sampled_from(SAMPLES), st.lists(st.integers(1, 30), min_size=1, max_size=8), st.booleans(), st.data())
def test_a_response_does_not_depend_on_how_its_tokens_arrive(sample, sizes, logprobs, data):
    cut = data.draw(st.one_of(st.none(), st.integers(1, len(sample.written))))
    assert without_ids(narrated(sample, sizes, logprobs=logprobs, cut=cut)) == without_ids(
        narrated(sample, [1], logprobs=logprobs, cut=cut)
    )


@given(st.sampled_from(SAMPLES), st.data())
def test_nothing_of_what_was_written_is_lost_where_it_is_cut_off(sample, data):
    cut = data.draw(st.integers(1, len(sample.written)))
    body = narrated(sample, [1], logprobs=False, cut=cut)
    broken = [item for item in body["output"] if item["type"] == "function_call" and item["status"] == "incomplete"]
    assert len(broken) <= 1
    others = [item for item in body["output"][:-1] if item not in broken]
    assert {item["status"] for item in others} <= {"completed"}
    if broken:
        assert body["output"][-1]["type"] == "message"
        assert broken[0]["name"] in texts(body, "message")
