"""What clients get through an ingress: the answers of replicas, and errors in their API's shape when one is lost."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from orjson import dumps

from runtime.api import FinishReason
from server.ray import ingress, replica
from server.ray.exchange import ResponseHead
from server.ray.prefixes import CHUNK_BYTES
from server.ray.replica import Replica, Unhealthy

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, MESSAGES_PATH, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
BODIES = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    MESSAGES_PATH: {"model": "tiny", "messages": MESSAGES, "max_tokens": 9},
    RESPONSES: {"input": "Hi"},
    OLLAMA: {"model": "tiny", "messages": MESSAGES},
}
paused = pytest.mark.parametrize("cluster", [{"paused": True}], indirect=True)


def body_of(path: str, *, stream: bool) -> bytes:
    return dumps({**BODIES[path], "stream": stream})


async def test_an_answer_is_the_replicas(cluster):
    head, body = await cluster.ask(CHAT, body_of(CHAT, stream=False), x_request_id="mine")
    assert head.status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "Hello"
    assert [value for name, value in head.headers if name == b"x-request-id"] == [b"mine"]
    assert len([name for name, _ in head.headers if name == b"date"]) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_is_what_the_replica_alone_would_send(cluster, path):
    head, body = await cluster.ask(path, body_of(path, stream=True))
    assert head.status == 200
    assert b"Hel" in body or body.count(b"l") >= 2
    assert body.endswith(b"\n")


def last_event(body: bytes) -> tuple[str, dict]:
    """Its name, if it has one, and its data; behind it may stand the end of the stream."""
    events = [each for each in body.decode().split("\n\n") if each and each != "data: [DONE]"]
    name, _, data = events[-1].rpartition("data: ")
    return name.removeprefix("event: ").strip(), json.loads(data)


async def lose(cluster, path: str) -> tuple[ResponseHead, bytes]:
    """A stream whose replica is lost after its second token."""
    asked = asyncio.create_task(cluster.ask(path, body_of(path, stream=True)))
    (engine, _) = cluster.engines
    await engine.until(lambda: bool(engine.live))
    engine.step()
    engine.step()
    for _ in range(20):  # of the loop's rounds: what is written has come by then
        await asyncio.sleep(0)
    cluster.fleet.lost.set()
    return await asked


@paused
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_stream_whose_replica_is_lost_ends_with_an_error_in_openais_shape(cluster, path):
    head, body = await lose(cluster, path)
    assert head.status == 200
    _, error = last_event(body)
    assert error["error"] == {
        "message": "The replica that processed the request has ended; retry the request",
        "type": "server_error", "param": None, "code": "replica_lost",
    }  # fmt: skip
    assert body.endswith(b"data: [DONE]\n\n")


@paused
async def test_anthropics_stream_ends_with_its_error_event(cluster):
    _, body = await lose(cluster, MESSAGES_PATH)
    name, error = last_event(body)
    assert (name, error["type"], error["error"]["type"]) == ("error", "error", "overloaded_error")


@paused
async def test_the_error_of_responses_counts_on(cluster):
    _, body = await lose(cluster, RESPONSES)
    name, error = last_event(body)
    numbers = [
        json.loads(each.rpartition("data: ")[2])["sequence_number"] for each in body.decode().split("\n\n") if each
    ]
    assert (name, error["type"], error["code"]) == ("error", "error", "replica_lost")
    assert numbers == [*range(len(numbers))]


@paused
async def test_ollamas_stream_ends_with_a_line(cluster):
    _, body = await lose(cluster, OLLAMA)
    assert set(json.loads(body.splitlines()[-1])) == {"error"}


@paused
async def test_what_has_not_begun_to_be_answered_is_refused_and_may_be_sent_again(cluster):
    asked = asyncio.create_task(cluster.ask(CHAT, body_of(CHAT, stream=False)))
    (engine, _) = cluster.engines
    await engine.until(lambda: bool(engine.live))
    cluster.fleet.lost.set()
    head, body = await asked
    assert head.status == 503
    assert (b"retry-after", b"1") in head.headers
    assert json.loads(body)["error"]["code"] == "replica_lost"


@paused
async def test_a_client_that_leaves_ends_its_request_at_the_replica(cluster):
    (engine, _) = cluster.engines
    async with aclosing(cluster.exchange(CHAT, body_of(CHAT, stream=True)).pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, ResponseHead):
                break
        await engine.until(lambda: bool(engine.live))
    await engine.until(lambda: not engine.live)
    assert [reason for _, reason in engine.ended] == [FinishReason.ABORT]


@pytest.mark.parametrize("cluster", [{"api_key": ("right",)}], indirect=True)
async def test_keys_are_asked_for_before_a_replica_hears_of_it(cluster):
    for headers in ({}, {"authorization": "Bearer wrong"}):
        head, body = await cluster.ask(CHAT, body_of(CHAT, stream=False), **headers)
        assert (head.status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    assert not cluster.fleet.requests
    head, _ = await cluster.ask(CHAT, body_of(CHAT, stream=False), authorization="Bearer right")
    assert head.status == 200


@pytest.mark.parametrize("cluster", [{"max_body_size": 2048}], indirect=True)
async def test_a_body_that_is_too_large_goes_no_further(cluster):
    head, body = await cluster.ask(MESSAGES_PATH, b"x" * 2049)
    assert (head.status, json.loads(body)["error"]["type"]) == (413, "request_too_large")
    assert not cluster.fleet.requests


async def test_a_request_has_names_for_the_beginnings_of_its_prompt(cluster):
    text = "x" * 3 * CHUNK_BYTES
    await cluster.ask(CHAT, dumps({"messages": [{"role": "user", "content": text}]}))
    assert len(cluster.fleet.requests[0].prefixes) == 3


async def test_metrics_are_those_of_all_with_their_names(cluster):
    await cluster.ask(CHAT, body_of(CHAT, stream=False))
    head, body = await cluster.ask("/metrics", method="GET", accept="application/openmetrics-text; version=1.0.0")
    assert head.status == 200
    lines = [line for line in body.decode().splitlines() if line.startswith("oneloop:http_requests_total{")]
    assert [line.partition(",")[0] for line in lines] == ['oneloop:http_requests_total{replica="a"']  # which had one
    assert body.count(b"# TYPE oneloop:step_time_seconds ") == 1
    assert {b'replica="a"' in body, b'replica="b"' in body} == {True}


async def test_what_changes_a_server_changes_all_replicas(cluster):
    head, body = await cluster.ask("/reset_prefix_cache")
    assert (head.status, json.loads(body)) == (200, {"success": True})
    assert [each.num_resets for each in cluster.engines] == [1, 1]


@paused
async def test_numbers_of_all_replicas_are_added_up(cluster):
    asked = asyncio.create_task(cluster.ask(CHAT, body_of(CHAT, stream=False)))
    (engine, _) = cluster.engines
    await engine.until(lambda: bool(engine.live))
    _, body = await cluster.ask("/abort_requests", dumps({"abort_all": True}))
    assert json.loads(body) == {"aborted": 1}
    assert (await asked)[0].status == 503


async def test_one_refusal_is_the_answer_of_all(cluster):
    head, body = await cluster.ask("/log_level", dumps({"level": "loud"}))
    assert (head.status, json.loads(body)["error"]["param"]) == (400, "level")


async def test_replicas_are_ended_by_serve_alone(cluster):
    head, _ = await cluster.ask("/drain")
    assert head.status == 409


async def test_paths_that_are_none_are_refused_as_ever(cluster):
    head, body = await cluster.ask("/nowhere")
    assert (head.status, json.loads(body)["error"]["code"]) == (404, "unknown_url")


async def test_a_request_that_nobody_takes_is_refused_in_time(cluster, monkeypatch):
    monkeypatch.setattr(ingress, "ACCEPT_LIMIT_S", 0.001)

    async def nobody(request, reply_to):
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster.replicas[0], "deliver", nobody)
    head, body = await cluster.ask(CHAT, body_of(CHAT, stream=True))
    assert (head.status, json.loads(body)["error"]["code"]) == (503, "service_unavailable")


async def test_a_replica_is_healthy_until_its_engine_is_not(cluster):
    replica: Replica = cluster.replicas[0]
    await replica.check_health()
    cluster.engines[0].unhealthy = "steps hang"
    with pytest.raises(Unhealthy, match="steps hang"):
        await replica.check_health()


@paused
async def test_a_replica_that_is_to_end_lets_its_requests_finish(cluster):
    asked = asyncio.create_task(cluster.ask(CHAT, body_of(CHAT, stream=True)))
    (engine, _) = cluster.engines
    await engine.until(lambda: bool(engine.live))
    stopping = asyncio.create_task(cluster.replicas[0].stop())
    refused, _ = await cluster.ask(CHAT, body_of(CHAT, stream=True))
    assert refused.status == 503
    for _ in range(6):
        engine.step()
    _, body = await asked
    assert body.endswith(b"data: [DONE]\n\n")
    await stopping
    assert engine.closed


async def test_a_replica_whose_engine_dies_ends_its_process(cluster, monkeypatch):
    ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(replica, "leave_at_once", lambda code, why: ended.set_result((code, why)))
    cluster.engines[0].die("the device is gone")
    assert await ended == (70, "the device is gone")
