"""Conversations: turns go out one behind another, each with the answers that were really given."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loadtests.applications import TurnsPrompt
from loadtests.arrivals import Poisson
from loadtests.figures import summarise
from loadtests.lengths import Lengths
from loadtests.load import RequestOptions, measure
from loadtests.workloads import Workload, find_workloads
from tests.loadtests.scripted_server import HEAD, ScriptedServer, answer, event

TWO_OF_THREE = Workload("w", TurnsPrompt(Lengths(2, 2), 3), 2, 6, Lengths(5, 9))


def roles(body: dict[str, object]) -> list[tuple[str, str]]:
    messages = body["messages"]
    assert isinstance(messages, list)
    return [(message["role"], message["content"]) for message in messages]


async def test_a_turn_holds_those_before_it_and_what_was_answered():
    server = ScriptedServer([answer(0, [0.0] * turn, 4) for turn in range(3)])
    async with server.running() as address:
        run = await measure(address, replace(TWO_OF_THREE, num_requests=3), RequestOptions("m"))
    first, second, third = map(roles, server.bodies)
    assert [role for role, _ in third] == ["user", "assistant", "user", "assistant", "user"]
    assert second == [*first, ("assistant", "x"), second[-1]]
    assert third == [*second, ("assistant", "xx"), third[-1]]
    assert len({user for role, user in third if role == "user"}) == 3
    assert [body["max_tokens"] for body in server.bodies] == replace(TWO_OF_THREE, num_requests=3).output_lengths()
    assert (len(run.answers), summarise(run)["errors"]) == (3, 0)


async def test_so_many_conversations_at_a_time_and_every_turn_is_an_answer():
    server = ScriptedServer([answer(0, [], 4)] * 6, wait_for_open=2)
    async with server.running() as address:
        figures = summarise(await measure(address, TWO_OF_THREE, RequestOptions("m")))
    assert (server.max_open, figures["ok"], figures["requests"]) == (2, 6, 6)


async def test_an_answer_that_breaks_is_an_error_and_the_conversation_goes_on_with_what_came():
    server = ScriptedServer([[(0, HEAD), (0, event("half"))], [(0, b"HTTP/1.1 503 No\r\n\r\nno")], answer(0, [], 4)])
    async with server.running() as address:
        figures = summarise(
            await measure(address, replace(TWO_OF_THREE, num_requests=3, concurrency=1), RequestOptions("m"))
        )
    assert (figures["ok"], figures["errors"]) == (1, 2)
    assert [role for role, _ in roles(server.bodies[2])] == ["user", "assistant", "user", "user"]
    assert ("assistant", "half") in roles(server.bodies[2])


def test_conversations_arrive_as_a_whole():
    assert len(replace(TWO_OF_THREE, arrivals=Poisson(3.0)).arrivals_s()) == 2
    assert replace(TWO_OF_THREE, num_warmup=1).warmup().num_requests == 3
    assert TWO_OF_THREE.scaled(0.5).num_requests == 3


def test_they_are_read_from_a_name():
    [found] = find_workloads(["m16_6_40_~100"])
    assert found.prompt == TurnsPrompt(Lengths(40, 40), 6)
    assert (found.concurrency, found.num_requests, found.num_arrivals, found.endpoint) == (16, 192, 32, "chat")
    assert find_workloads(["turns"])[0].prompt.num_turns == 6


def test_fields_of_all_requests_are_in_every_turn_and_none_removes_one():
    [conversation, _] = TWO_OF_THREE.bodies("m", extra={"seed": 3, "temperature": None})
    body = json.loads(conversation.body(["a"]))
    assert (body["model"], body["seed"], body["ignore_eos"], "temperature" in body) == ("m", 3, True, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_requests": 4}, "no dialogues of 3"), ({"endpoint": "completions"}, "chat endpoint only")],
)
def test_what_is_no_conversation_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(TWO_OF_THREE, **changes)
