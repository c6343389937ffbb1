"""Beam search as a client asks for it, over a scripted engine that finds token 0 likeliest, then 1, then 2, wherever it looks."""

from __future__ import annotations

import asyncio
from itertools import groupby

import pytest

from runtime.api import EngineStopped, FinishReason
from server.generate import beams as generate_beams
from server.generate.beams import _Search
from tests.server.conftest import MESSAGES

BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def beams(serve):
    return lambda **options: serve(script=lambda request: [3], **options)


async def test_the_best_beams_are_the_answers(beams, tokenizer):
    server = await beams()
    body = (await server.complete(prompt=["ab", "c"], logprobs=1, return_token_ids=True, **BEAMS)).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [[0, 0, 0], [0, 0, 1]] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["choices"][1]["logprobs"]["token_logprobs"] == [0.0, 0.0, -1.0]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12


async def test_best_of_is_the_number_of_beams(beams):
    server = await beams()
    choices = (await server.chat(**{**BEAMS, "n": 1, "best_of": 3}, return_token_ids=True)).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[0, 0, 0]]
    assert [len(request.prompt_ids) - len(server.engine.submitted[0].prompt_ids) for request in server.engine.submitted] == [
        0, 1, 1, 1, 2, 2, 2,
    ]  # fmt: skip


async def test_an_echo_and_the_prompts_scores_come_along(beams):
    server = await beams()
    choices = (await server.complete(prompt="ab", echo=True, logprobs=0, prompt_logprobs=0, **BEAMS)).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [5, 5]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2]
    assert [request.params.prompt_logprobs for request in server.engine.submitted] == [0, *[None] * 4]


async def test_values_that_ask_nothing_of_a_draw_pass(beams):
    server = await beams()
    fields = {
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "seed": 5,
        "stop": [],
        "length_penalty": 0.5,
        "early_stopping": "never",
    }
    assert (await server.chat(**BEAMS, **fields)).status_code == 200


async def test_a_client_who_leaves_ends_the_search(beams):
    server = await beams(paused=True)
    stream = await server.open_stream("/v1/chat/completions", messages=MESSAGES, **BEAMS)
    await server.engine.until(lambda: server.engine.submitted)
    server.engine.step()
    await server.engine.until(lambda: len(server.engine.submitted) == 3)
    stream.leave()
    await server.engine.until(lambda: not server.engine.live)
    assert [reason for _, reason in server.engine.ended] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.ABORT,
    ]


async def test_an_engine_that_stops_in_between_is_an_error(beams):
    server = await beams(paused=True)
    answer = asyncio.create_task(server.chat(**BEAMS))
    await server.engine.until(lambda: server.engine.submitted)
    server.engine.refuse = EngineStopped("draining")
    server.engine.step()
    assert (await answer).status_code == 503


async def test_a_beam_that_fails_is_an_error_and_no_answer(beams):
    server = await beams(paused=True)
    answer = asyncio.create_task(server.chat(**BEAMS))
    await server.engine.until(lambda: server.engine.submitted)
    server.engine.fail("bad luck")
    response = await answer
    assert response.status_code == 500
    assert "bad luck" not in response.text


async def test_the_official_client_asks_for_beams(beams):
    server = await beams()
    async with server.openai() as client:
        answer = await client.completions.create(
            model="tiny", prompt="ab", n=2, max_tokens=3, extra_body={"use_beam_search": True, "ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == [0, 1]


async def test_others_have_their_turn_while_the_alternatives_of_many_beams_are_freed(beams, monkeypatch):
    server = await beams()
    turns: list[int] = []
    advance = _Search.advance

    def advancing(search, replies):
        advance(search, replies)
        asyncio.get_running_loop().call_soon(lambda: turns.append(len(server.engine.submitted)))

    monkeypatch.setattr(_Search, "advance", advancing)
    await server.complete(**{**BEAMS, "n": 1, "best_of": 40})
    # Behind each step a turn comes before the next one is asked for.
    assert turns == [1, 41, 81]


async def test_others_have_their_turn_while_many_beams_ask(beams, monkeypatch):
    monkeypatch.setattr(generate_beams, "ASKED_AT_ONCE", 8)
    server = await beams()
    turns: list[int] = []
    questions = _Search.questions

    def asking(search):
        for question in questions(search):
            turns.append(0)
            asyncio.get_running_loop().call_soon(lambda: turns.append(1))
            yield question

    monkeypatch.setattr(_Search, "questions", asking)
    await server.complete(**{**BEAMS, "n": 1, "best_of": 40, "max_tokens": 2})
    in_a_row = [len(list(group)) for asks, group in groupby(turns) if not asks]
    assert max(in_a_row) == 8
