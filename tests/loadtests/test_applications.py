"""What applications send: shapes of bodies, what is shared, what is not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loadtests.answers import read_answer
from loadtests.exchange import Recording
from loadtests.figures import summarise
from loadtests.load import RequestOptions, measure
from loadtests.workloads import find_workloads
from tests.loadtests.scripted_server import ScriptedServer, answer


def workload(name: str, **changes: object):
    [found] = find_workloads([name])
    return replace(found, **changes)


def bodies(name: str, **changes: object) -> list[dict[str, object]]:
    return [json.loads(body) for body in workload(name, **changes).bodies("m")]  # type: ignore[arg-type]


def test_questions_on_documents_share_the_documents_that_are_asked_for_most():
    systems = [body["messages"][0]["content"].split("\n\n") for body in bodies("rag")]
    assert {len(parts) for parts in systems} == {5}
    assert all(len(set(parts)) == 5 for parts in systems)  # no document twice in a prompt
    firsts = [parts[1] for parts in systems]
    # Of 64 prompts, the most popular of 64 documents comes first in 64 / H(64) = 13 on the average; were all as popular, in one.
    assert max(map(firsts.count, firsts)) >= 6
    assert len(set(firsts)) > 5
    assert len({body["messages"][1]["content"] for body in bodies("rag")}) == 64


async def test_an_agent_sends_its_tools_its_calls_and_what_was_really_said():
    server = ScriptedServer([answer(0, [], 4)] * 8)
    async with server.running() as address:
        shape = workload("agents", num_requests=8, concurrency=1, num_warmup=0)
        figures = summarise(await measure(address, shape, RequestOptions("m")))
    assert (figures["ok"], figures["requests"], shape.num_arrivals) == (8, 8, 1)
    assert {len(body["tools"]) for body in server.bodies} == {6}
    last = server.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user", *["assistant", "tool"] * 7]
    assert server.bodies[-2]["messages"] == last[:-2]
    for said, result in zip(last[2::2], last[3::2], strict=True):
        [call] = said["tool_calls"]
        assert said["content"] == "x"
        assert call["id"] == result["tool_call_id"]
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in server.bodies[0]["tools"]}
        assert (
            json.loads(call["function"]["arguments"]).keys() == offered[call["function"]["name"]]["properties"].keys()
        )


def test_answers_of_a_form_end_by_themselves_and_ask_for_few_forms():
    sent = bodies("structured")
    assert not any("ignore_eos" in body for body in sent)
    forms = {json.dumps(body["response_format"]) for body in sent}
    assert 5 <= len(forms) <= 8
    for form in map(json.loads, forms):
        schema = form["json_schema"]["schema"]
        assert schema["required"] == list(schema["properties"])
    assert workload("structured").ends_by_itself
    assert not workload("rag").ends_by_itself


async def test_answers_that_end_by_themselves_are_of_no_other_length_than_asked():
    server = ScriptedServer([answer(0, [], 4)] * 2)
    async with server.running() as address:
        run = await measure(address, workload("structured", num_requests=2, num_warmup=0), RequestOptions("m"))
    assert summarise(run)["other_length"] == 0


def test_texts_to_embed_ask_for_nothing_that_is_generated():
    [body, *_] = bodies("embeddings")
    assert body.keys() == {"model", "input"}
    assert isinstance(body["input"], list)


def embedded(body: bytes, status: str = "200 OK") -> Recording:
    return Recording(1.0, [3.0], [f"HTTP/1.1 {status}\r\n\r\n".encode() + body])


def test_embeddings_are_whole_at_once():
    body = {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    found = read_answer(embedded(json.dumps(body).encode()), "embeddings")
    assert (found.error, found.num_prompt_tokens, found.num_output_tokens) == (None, 9, 0)
    assert (found.ttft_s, found.e2e_s, found.tpot_s) == (2.0, 2.0, None)


@pytest.mark.parametrize(
    ("recording", "error"),
    [
        (embedded(b'{"data": []}'), "an embedding is empty"),
        (embedded(b'{"data": [{"embedding": []}]}'), "an embedding is empty"),
        (embedded(b'{"data": [{}]}'), "no embeddings"),
        (embedded(b'{"data": [{"emb'), "no embeddings"),
        (embedded(b'{"error": {"message": "not here"}}', "404 Not Found"), "HTTP 404: not here"),
    ],
)
def test_what_are_no_embeddings_is_an_error(recording, error):
    assert error in (read_answer(recording, "embeddings").error or "")


@pytest.mark.parametrize(
    ("name", "endpoint"), [("rag", "completions"), ("embeddings", "chat"), ("c1", "embeddings"), ("edit", "embeddings")]
)
def test_a_workload_goes_to_no_endpoint_that_it_is_not_for(name, endpoint):
    with pytest.raises(ValueError, match=r"endpoint only|use the workload named"):
        workload(name, endpoint=endpoint)
