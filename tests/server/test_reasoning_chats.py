"""Reasoning in chats: split from the answer, counted, shown under both names or hidden, whoever opens the block."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api import FinishReason, Output
from server.generate.generation import Choice, TextOptions
from server.models.chat_format import OutputParser
from server.text.events import Event, ToolCallStart, joined
from server.text.reasoning import THINK
from server.text.tools.harmony import Harmony
from server.text.tools.hermes import Hermes
from tests.server.conftest import MESSAGES
from tests.server.test_refusals import error_of
from tests.server.test_tool_calls import CHAT, TWO, speaker, together
from tests.server.text.tool_samples import SAMPLES, TOOLS
from tests.server.tiny import EOS, tiny_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
THINKING = TURNS + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
BEGUN = TURNS + "<think>\n{% endif %}"
SAYS = "<think>\nHm.\n</think>\n\nYes."


def thinker(template: str = THINKING, *special: str):
    return tiny_tokenizer(*special, chat_template=template)


async def both(server, **fields):
    """Message, usage and finish_reason of a whole answer, and what a stream of it adds up to."""
    body = (await server.chat(**fields)).json()
    events = await server.events(CHAT, messages=MESSAGES, stream_options={"include_usage": True}, **fields)
    assert events[-1]["usage"] == body["usage"]
    streamed = together(events[:-1])
    choice = body["choices"][0]
    assert choice["finish_reason"] == streamed["finish_reason"]
    assert (choice["message"]["content"] or "") == streamed["content"]
    assert choice["message"].get("reasoning", "") == streamed["reasoning"]
    return choice["message"], body["usage"], choice["finish_reason"]


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
async def test_reasoning_is_split_from_the_answer_and_counted(serve, special):
    server = await serve(SAYS, speaks=thinker(THINKING, *special))
    message, usage, _ = await both(server)
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert message["content"] == "Yes."
    # Of the opening tag only its last byte, with which it became one; then all up to the end of the closing one.
    expected = 1 + len("\nHm.\n") + 1 if special else 1 + len("\nHm.\n</think>")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}


async def test_a_template_may_open_the_block_itself(serve):
    server = await serve("Hm.\n</think>\n\nYes.", speaks=thinker(BEGUN))
    message, usage, _ = await both(server)
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("Hm.\n</think>")


async def test_an_answer_without_a_block_is_the_answer(serve):
    server = await serve("Yes. </think>", speaks=thinker())
    message, usage, _ = await both(server)
    assert message == {"role": "assistant", "content": "Yes. </think>", "refusal": None}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_cut_off_leaves_no_content(serve):
    server = await serve(SAYS, speaks=thinker())
    message, usage, finish_reason = await both(server, max_tokens=10)
    assert (message["content"], message["reasoning"]) == (None, "Hm")
    assert finish_reason == "length"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4


@pytest.mark.parametrize(("says", "template"), [("<think>\nHm. So", THINKING), ("Hm. So", BEGUN)])
async def test_a_model_that_stops_in_the_midst_of_its_reasoning_has_said_nothing(serve, says, template):
    server = await serve(says, speaks=thinker(template))
    message, usage, finish_reason = await both(server)
    assert (message["content"], message["reasoning"], finish_reason) == (None, "Hm. So", "stop")
    assert usage["completion_tokens_details"]["reasoning_tokens"] > len("Hm. So")
    hidden, _, finish_reason = await both(server, include_reasoning=False)
    assert (hidden, finish_reason) == ({"role": "assistant", "content": "", "refusal": None}, "stop")


async def test_hidden_reasoning_is_still_paid_for(serve):
    server = await serve(SAYS, speaks=thinker())
    message, usage, _ = await both(server, include_reasoning=False)
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert (await both(server, include_reasoning=True))[0]["reasoning"] == "Hm."


async def test_without_a_reasoning_parser_the_tags_are_shown(serve):
    server = await serve(SAYS, speaks=thinker(), reasoning_parser="none")
    body = (await server.chat()).json()
    assert body["choices"][0]["message"]["content"] == SAYS
    assert "completion_tokens_details" not in body["usage"]


async def test_calls_are_looked_for_behind_the_reasoning(serve):
    server = await serve(f"<think>{TWO}</think>{TWO}", speaks=thinker(), max_model_len=8192)
    message, _, finish_reason = await both(server, tools=TOOLS)
    assert message["reasoning"] == TWO
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "time"]
    assert finish_reason == "tool_calls"


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_channels_are_read_with_and_without_tools(serve, tools):
    sample = next(sample for sample in SAMPLES if sample.tool_parser == "harmony" and not sample.calls)
    server = await serve(sample.written, speaks=speaker("harmony", special=True), tool_parser="harmony")
    message, usage, finish_reason = await both(server, tools=tools)
    assert (message["reasoning"], message["content"]) == (sample.reasoning, sample.text)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm.") + 2}
    assert finish_reason == "stop"


# --- how much ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effort", "ends"), [("none", "<think>\n\n</think>\n\n"), ("low", "<assistant>"), (None, "<assistant>")]
)
async def test_effort_switches_templates_that_can_only_be_switched(serve, effort, ends):
    server = await serve(SAYS, speaks=thinker())
    response = await server.chat(reasoning_effort=effort)
    assert "x-ignored-fields" not in response.headers
    assert server.tokenizer.decode(server.engine.submitted[0].prompt_ids).endswith(ends)


async def test_effort_reaches_templates_that_have_degrees_and_a_clients_own_words_win(serve):
    server = await serve(speaks=thinker("{{ reasoning_effort }}|{{ messages[0].content }}"))
    await server.chat(reasoning_effort="xhigh")
    await server.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "own"})
    said = [server.tokenizer.decode(request.prompt_ids) for request in server.engine.submitted]
    assert said == ["xhigh|Hi", "own|Hi"]


async def test_gpt_oss_has_three_degrees(serve):
    template = "{{ reasoning_effort }}<|channel|><|message|>"
    server = await serve("Hi", speaks=thinker(template))
    for effort in ("minimal", "medium", "max"):
        await server.chat(reasoning_effort=effort)
    said = [server.tokenizer.decode(request.prompt_ids)[:4] for request in server.engine.submitted]
    assert said == ["low<", "medi", "high"]
    error = error_of(await server.chat(reasoning_effort="none"), 400)
    assert error["param"] == "reasoning_effort"
    assert "low, medium, high" in error["message"]


async def test_effort_that_no_template_hears_of_is_named_as_ignored_or_refused(serve):
    server = await serve("Hi")
    response = await server.chat(reasoning_effort="low")
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "reasoning_effort"
    strict = await serve("Hi", strict_fields=True)
    assert error_of(await strict.chat(reasoning_effort="low"), 400)["param"] == "reasoning_effort"


# --- history and prefill ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_of_earlier_turns_reaches_the_template_under_either_name(serve, name):
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    server = await serve(speaks=thinker(template))
    await server.chat(messages=[*MESSAGES, {"role": "assistant", "content": "a", name: "because"}, *MESSAGES])
    assert server.tokenizer.decode(server.engine.submitted[0].prompt_ids) == "|;because|because;|;"


async def test_a_last_message_goes_on_in_the_midst_of_its_reasoning_or_its_answer(serve):
    server = await serve("Hm.</think>Yes.", speaks=thinker())
    for content, reasoning, text in (("<think>\nWell, ", "Hm.", "Yes."), ("Well, ", "", "Hm.</think>Yes.")):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        body = (await server.chat(messages=messages, continue_final_message=True)).json()
        message = body["choices"][0]["message"]
        assert (message.get("reasoning", ""), message["content"]) == (reasoning, text)
        prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
        assert prompt == "<user>Hi<assistant>" + content


# --- however tokens fall into outputs -----------------------------------------------------------------------------

OUTPUT_PARSERS = {
    "think": OutputParser(tags=THINK),
    "think and hermes": OutputParser(Hermes, TOOLS, THINK),
    "one call": OutputParser(Hermes, TOOLS, parallel=False),
    "harmony": OutputParser(Harmony, TOOLS),
    "hidden": OutputParser(Hermes, TOOLS, THINK, show_reasoning=False),
}
TEXTS = [
    SAYS,
    f"<think>a{TWO}</think>b{TWO}c",
    TWO,
    *(s.written for s in SAMPLES if s.tool_parser == "harmony"),
    "<think>never",
]


def events_of(
    output_parser: OutputParser, ids: list[int], cuts: list[int], stop: tuple[str, ...]
) -> tuple[list[Event], object]:
    bounds = [0, *sorted({cut % len(ids) for cut in cuts} - {0}), len(ids)]
    ended: list[bool] = []
    choice = Choice(TOKENIZER, TextOptions(stop=stop, output_parser=output_parser), lambda: ended.append(True))
    events: list[Event] = []
    for start, end in itertools.pairwise(bounds):
        events += choice.events(Output(0, ids[start:end], FinishReason.STOP if end == len(ids) else None))
        if choice.finish_reason is not None:
            break
    nameless = [
        ToolCallStart(event.index, event.name) if isinstance(event, ToolCallStart) else event for event in events
    ]
    return list(joined(nameless)), (
        choice.finish_reason, choice.stop_reason, choice.num_tokens, choice.num_reasoning_tokens,
    )  # fmt: skip


TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("output_parser", OUTPUT_PARSERS.values(), ids=OUTPUT_PARSERS)
@given(
    text=st.sampled_from(TEXTS),
    cuts=st.lists(st.integers(1, 1000), max_size=12),
    stop=st.sampled_from(["", "a", "x\n"]),
)
def test_events_counts_and_ends_do_not_depend_on_how_tokens_come(output_parser, text, cuts, stop):
    ids = [*TOKENIZER.encode(text), EOS]
    stops = (stop,) if stop else ()
    one_by_one = events_of(output_parser, ids, list(range(1, len(ids))), stops)
    assert events_of(output_parser, ids, cuts, stops) == one_by_one
