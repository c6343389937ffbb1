"""/v1/chat/completions over a scripted engine: shapes, order of chunks, and why an answer ended."""

from __future__ import annotations

import json

import pytest

from runtime.api import FinishReason
from server.models.defaults import sampling_defaults
from tests.server.conftest import MESSAGES
from tests.server.tiny import END, EOS, START

CHAT = "/v1/chat/completions"


async def test_a_whole_answer_has_openais_shape(serve):
    server = await serve("Hello there")
    response = await server.chat()
    body = response.json()
    prompt_tokens = len(server.engine.submitted[0].prompt_ids)
    assert response.headers["content-type"] == "application/json"
    assert body["id"].startswith("chatcmpl-")
    assert {key: body[key] for key in ("object", "model", "choices", "usage")} == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 12,  # eleven bytes and the end-of-sequence token
            "total_tokens": prompt_tokens + 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert body["system_fingerprint"].startswith("oneloop-")
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}


async def test_the_prompt_is_the_template_with_a_generation_prompt(serve, tokenizer):
    server = await serve()
    await server.chat(messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    ids = server.engine.submitted[0].prompt_ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == START


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_generation_prompt": False}, "<|im_start|>user\nHi<|im_end|>\n"),
        ({"chat_template_kwargs": {"assistant": "bot"}}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>bot\n"),
        (
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "D"}]}]},
            "<|im_start|>system\nD<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
async def test_what_shapes_the_prompt(serve, tokenizer, fields, expected):
    server = await serve()
    await server.chat(**fields)
    assert tokenizer.decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False) == expected


async def test_chunks_come_in_order_role_text_finish_usage(serve):
    server = await serve("ab")
    events = await server.events(CHAT, messages=MESSAGES, stream_options={"include_usage": True})
    constant = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    assert len(constant) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    choices = [choice for event in events for choice in event["choices"]]
    assert choices == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None},
    ]
    assert [event["usage"] for event in events[:-1]] == [None] * 4
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert ["system_fingerprint" in event for event in events] == [False] * 4 + [True]


async def test_without_include_usage_no_chunk_speaks_of_it(serve):
    server = await serve("ab")
    events = await server.events(CHAT, messages=MESSAGES)
    assert not any("usage" in event for event in events)
    assert ["system_fingerprint" in event for event in events] == [False] * 3 + [True]


async def test_the_last_text_travels_with_the_finish_reason(serve):
    server = await serve("abc")
    events = await server.events(CHAT, messages=MESSAGES, max_tokens=2)
    assert events[-1]["choices"][0]["delta"] == {"content": "b"}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def text_of(events: list[dict], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize(
    "says", ["plain", "Grüße, 世界! 👩‍👩‍👧 e\u0301 \U0001f1e9\U0001f1ea", '\n\t"quotes" \\ \u2028', ""]
)
async def test_streamed_text_is_the_whole_text_however_bytes_fall_into_tokens(serve, says):
    server = await serve(says)
    whole = (await server.chat()).json()["choices"][0]["message"]["content"]
    assert text_of(await server.events(CHAT, messages=MESSAGES)) == whole == says


async def test_a_character_that_never_completes_ends_as_replacement(serve, tokenizer):
    half = tokenizer.encode("é")[:1]
    server = await serve(script=lambda request: [*tokenizer.encode("a"), *half, EOS])
    assert (await server.chat()).json()["choices"][0]["message"]["content"] == "a\ufffd"
    assert text_of(await server.events(CHAT, messages=MESSAGES)) == "a\ufffd"


# --- why it ended -------------------------------------------------------------------------------------------------


async def finish(server, **fields) -> tuple[str, str | None, str | int | None, int]:
    """Text, finish_reason, stop_reason and completion tokens, which streaming must not change."""
    body = (await server.chat(**fields)).json()
    choice = body["choices"][0]
    events = await server.events(CHAT, messages=MESSAGES, stream_options={"include_usage": True}, **fields)
    last = [event["choices"][0] for event in events if event["choices"]][-1]
    text, tokens = choice["message"]["content"], body["usage"]["completion_tokens"]
    assert (text_of(events), last["finish_reason"], last["stop_reason"]) == (
        text, choice["finish_reason"], choice["stop_reason"],
    )  # fmt: skip
    assert events[-1]["usage"]["completion_tokens"] == tokens
    return text, choice["finish_reason"], choice["stop_reason"], tokens


async def test_an_end_of_sequence_stops_silently(serve):
    assert await finish(await serve("abc")) == ("abc", "stop", None, 4)


async def test_max_tokens_is_a_length(serve):
    assert await finish(await serve("abc"), max_tokens=2) == ("ab", "length", None, 2)
    assert await finish(await serve("abc"), max_completion_tokens=1) == ("a", "length", None, 1)


async def test_ignore_eos_goes_on_to_the_length(serve):
    assert await finish(await serve("abc"), ignore_eos=True, max_tokens=6) == ("abcab", "length", None, 6)


async def test_without_max_tokens_an_answer_may_take_the_rest_of_the_context(serve):
    server = await serve("abc", max_model_len=40)
    await server.chat(ignore_eos=True)
    request = server.engine.submitted[0]
    assert request.params.max_tokens == 40 - len(request.prompt_ids)


@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("lo t", False, ("Hel", "stop", "lo t", 7)),
        ("lo t", True, ("Hello t", "stop", "lo t", 7)),
        (["xx", "there"], False, ("Hello ", "stop", "there", 11)),
        (["H"], False, ("", "stop", "H", 1)),
        (["nope", "there!"], False, ("Hello there", "stop", None, 12)),
        ([], False, ("Hello there", "stop", None, 12)),
        (None, False, ("Hello there", "stop", None, 12)),
    ],
)
async def test_a_stop_string_across_tokens_ends_the_text_before_it(serve, stop, include, expected):
    server = await serve("Hello there")
    assert await finish(server, stop=stop, include_stop_str_in_output=include) == expected


async def test_a_stop_string_ends_the_work_too(serve):
    server = await serve("Hello there")
    await server.chat(stop="lo")
    assert [reason for _, reason in server.engine.ended] == [FinishReason.STOP]


async def test_nothing_of_a_stop_string_is_shown_before_it_is_certain(serve):
    server = await serve("a12x12")
    events = await server.events(CHAT, messages=MESSAGES, stop="123")
    deltas = [event["choices"][0]["delta"].get("content") for event in events]
    assert deltas == ["", "a", "12x", "12"]


async def test_a_stop_token_ends_with_its_id_and_without_its_text(serve, tokenizer):
    (o,) = tokenizer.encode("o")
    server = await serve("Hello there")
    assert await finish(server, stop_token_ids=[o]) == ("Hell", "stop", o, 5)
    assert await finish(server, stop_token_ids=[o], include_stop_str_in_output=True) == ("Hello", "stop", o, 5)


async def test_min_tokens_holds_back_stop_strings_and_tokens(serve, tokenizer):
    server = await serve("abab")
    assert await finish(server, stop="ab", min_tokens=2) == ("ab", "stop", "ab", 4)
    (a,) = tokenizer.encode("a")
    assert await finish(server, stop_token_ids=[a], min_tokens=2) == ("ab", "stop", a, 3)


async def test_special_tokens_are_text_only_if_asked_for(serve, tokenizer):
    server = await serve(script=lambda request: [*tokenizer.encode("a"), END, *tokenizer.encode("b"), EOS])
    assert (await finish(server))[0] == "ab"
    assert (await finish(server, skip_special_tokens=False))[0] == "a<|im_end|>b"


# --- several choices ----------------------------------------------------------------------------------------------


async def test_n_choices_are_one_submit_with_seeds_of_their_own(serve, tokenizer):
    server = await serve(script=lambda request: [*tokenizer.encode(f"seed {request.params.seed}"), EOS])
    body = (await server.chat(n=3, seed=7)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["seed 7", "seed 8", "seed 9"]
    assert body["usage"]["prompt_tokens"] == len(server.engine.submitted[0].prompt_ids)
    assert body["usage"]["completion_tokens"] == 3 * 7


async def test_the_largest_seed_has_successors_too(serve):
    server = await serve()
    await server.chat(n=2, seed=2**63 - 1)
    assert [request.params.seed for request in server.engine.submitted] == [2**63 - 1, -(2**63)]


async def test_streamed_choices_interleave_and_each_is_whole(serve, tokenizer):
    server = await serve(script=lambda request: [*tokenizer.encode("abc"[request.params.seed :] + "!"), EOS])
    events = await server.events(CHAT, messages=MESSAGES, n=3, seed=0)
    assert [text_of(events, index) for index in range(3)] == ["abc!", "bc!", "c!"]
    choices = [event["choices"][0] for event in events]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


async def test_a_stop_string_in_one_choice_leaves_the_others_alone(serve, tokenizer):
    server = await serve(script=lambda request: [*tokenizer.encode(["ab!x", "abcd"][request.params.seed]), EOS])
    body = (await server.chat(n=2, seed=0, stop="!")).json()
    assert [(c["message"]["content"], c["stop_reason"]) for c in body["choices"]] == [("ab", "!"), ("abcd", None)]


async def test_cached_tokens_are_the_prompts_not_the_choices(serve):
    server = await serve()
    server.engine.num_cached_tokens = 4
    body = (await server.chat(n=3)).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


# --- what the engine hears ----------------------------------------------------------------------------------------


async def test_sampling_parameters_reach_the_engine(serve):
    server = await serve()
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "seed": 3, "min_tokens": 2, "max_tokens": 9, "ignore_eos": True,
    }  # fmt: skip
    await server.chat(**given, logit_bias={"5": -100, "6": 1.5}, stop_token_ids=[7, 7, 8])
    params = server.engine.submitted[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert dict(params.logit_bias) == {5: -100.0, 6: 1.5}
    assert params.stop_token_ids == {7, 8}


@pytest.mark.parametrize(("sent", "got"), [(0, 0.0), (1e-6, 0.0), (0.001, 0.01), (0.01, 0.01), (2, 2.0)], ids=str)
async def test_temperatures_too_small_to_divide_by_are_greedy_or_raised(serve, sent, got):
    server = await serve()
    await server.chat(temperature=sent)
    assert server.engine.submitted[0].params.temperature == got


async def test_top_k_off_has_two_spellings_and_all_is_off(serve):
    server = await serve()
    for sent in (0, -1, 10**6):
        await server.chat(top_k=sent)
    assert [request.params.top_k for request in server.engine.submitted] == [0, 0, 0]


async def test_defaults_are_the_models_and_requests_override_them(serve):
    defaults = sampling_defaults({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None})
    server = await serve(defaults=defaults)
    await server.chat(top_p=0.5)
    params = server.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 20, 0.0)


async def test_an_answer_needs_no_model_name_and_carries_the_first(serve):
    server = await serve(served_model_name=("first", "second"))
    for sent in ({}, {"model": "first"}, {"model": "second"}):
        assert (await server.chat(**sent)).json()["model"] == "first"


async def test_priority_and_salt_reach_the_engine(serve):
    server = await serve(scheduling_policy="priority")
    await server.chat(priority=-3, cache_salt="tenant")
    request = server.engine.submitted[0]
    assert (request.priority, request.cache_salt) == (-3, "tenant")


async def test_harmless_fields_and_idle_values_pass(serve):
    server = await serve()
    response = await server.chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x", prompt_cache_key="y",
        logprobs=False, top_logprobs=0, tools=None, tool_choice="none", n=1, response_format={"type": "text"}, echo=False,
        best_of=1, stream=False, parallel_tool_calls=True, modalities=["text"], seed=-1, top_k=-1,
    )  # fmt: skip
    assert response.status_code == 200
    assert server.engine.submitted[0].params.seed is None


# --- the official client ------------------------------------------------------------------------------------------


async def test_the_openai_client_reads_both_kinds(serve):
    server = await serve("Hello")
    async with server.openai() as client:
        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert whole.choices[0].message.content == "Hello"
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage.completion_tokens == 6


async def test_a_request_id_goes_in_and_out(serve):
    server = await serve()
    response = await server.post(CHAT, {"messages": MESSAGES}, headers={"X-Request-Id": "abc-123"})
    assert response.headers["x-request-id"] == "abc-123"
    assert response.json()["id"] == "chatcmpl-abc-123"
    assert server.engine.submitted[0].id == "chatcmpl-abc-123-0"


async def test_a_body_may_bring_the_id_unless_the_head_does(serve):
    server = await serve()
    response = await server.chat(request_id="abc-123")
    assert (response.headers["x-request-id"], response.json()["id"]) == ("abc-123", "chatcmpl-abc-123")
    response = await server.post(CHAT, {"messages": MESSAGES, "request_id": "b"}, headers={"X-Request-Id": "h"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("h", "chatcmpl-h")


async def test_an_id_that_could_forge_a_log_line_is_replaced(serve):
    server = await serve()
    response = await server.post(CHAT, {"messages": MESSAGES}, headers={"X-Request-Id": "a b\tc"})
    assert " " not in response.headers["x-request-id"]
    assert json.loads(response.text)["id"] == "chatcmpl-" + response.headers["x-request-id"]
