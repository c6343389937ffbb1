"""Streams on a bare socket: framing, pings, clients that leave or do not read, and errors on the way."""

from __future__ import annotations

import asyncio
import json

import pytest

from runtime.api import FinishReason, Output
from server.http.protocol import MAX_HEAD_BYTES
from server.http.sse import PING
from tests.server.conftest import MESSAGES
from tests.server.tiny import EOS

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": MESSAGES, "stream": True, "ignore_eos": True}


async def test_every_token_is_a_chunk_of_its_own_as_it_settles(serve):
    server = await serve("abc", paused=True)
    answer = await server.open_stream(CHAT, messages=MESSAGES, stream=True)
    head = await answer.head()
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    for header in (
        "content-type: text/event-stream",
        "cache-control: no-cache",
        "x-accel-buffering: no",
        "x-request-id: ",
    ):
        assert header in head
    server.engine.step()
    first = await answer.chunk()
    assert first.count(b"data: ") == 2  # the role and the first token, in one piece
    assert b'"role":"assistant"' in first
    server.engine.step()
    second = await answer.chunk()
    assert second.startswith(b"data: {")
    assert second.endswith(b"}\n\n")
    assert json.loads(second[6:])["choices"][0]["delta"] == {"content": "b"}
    server.engine.step(2)
    rest = b"".join(await answer.chunks())
    assert rest.endswith(b"\n\ndata: [DONE]\n\n")


async def test_what_a_reader_missed_comes_as_one_chunk_of_several_events(serve):
    server = await serve("abcdef", paused=True)
    answer = await server.open_stream(CHAT, messages=MESSAGES, stream=True)
    await answer.head()
    server.engine.step(5)
    chunk = await answer.chunk()
    assert b'"content":"abcde"' in chunk


async def test_a_ping_breaks_the_silence_before_the_first_token_and_is_no_event(serve):
    server = await serve("a", paused=True, ping_interval=0.01)
    answer = await server.open_stream(CHAT, messages=MESSAGES, stream=True)
    await answer.head()
    assert await answer.chunk() == PING
    assert await answer.chunk() == PING
    server.engine.step(2)
    rest = b"".join(await answer.chunks())
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_the_openai_client_does_not_stumble_over_pings(serve):
    server = await serve("ab", paused=True, ping_interval=0.01)

    async def pinged() -> None:
        """Steps only once another stream has seen two pings."""
        watcher = await server.open_stream(CHAT, messages=MESSAGES, stream=True)
        await watcher.head()
        await watcher.chunk()
        await watcher.chunk()

    async with server.openai() as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        await pinged()
        server.engine.step(3)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ab"


@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_request_at_once(serve, stream, tokens_before):
    server = await serve("abc", paused=True)
    answer = await server.open_stream(CHAT, **{**ENDLESS, "stream": stream})
    await server.engine.until(lambda: len(server.engine.live) == 1)
    server.engine.step(tokens_before)
    if stream:
        await answer.head()
    answer.leave()
    await server.engine.until(lambda: not server.engine.live)  # though not a token flows
    assert [reason for _, reason in server.engine.ended] == [FinishReason.ABORT]
    assert (await server.http.get("/health")).json()["running"] == 0


async def test_a_whole_answer_nobody_waits_for_is_counted_as_such(serve):
    server = await serve(paused=True)
    answer = await server.open_stream(CHAT, messages=MESSAGES)
    await server.engine.until(lambda: bool(server.engine.live))
    answer.leave()
    await server.engine.until(lambda: not server.engine.live)
    metrics = (await server.http.get("/metrics")).text
    assert f'route="{CHAT}",status="499"' in metrics


async def test_a_client_that_leaves_ends_all_its_choices(serve):
    server = await serve(paused=True)
    answer = await server.open_stream(CHAT, **ENDLESS, n=4)
    await server.engine.until(lambda: len(server.engine.live) == 4)
    answer.leave()
    await server.engine.until(lambda: not server.engine.live)
    assert len(server.engine.ended) == 4


async def test_a_reader_that_does_not_read_slows_nobody_and_loses_nothing(serve, tokenizer):
    text = "0123456789abcdef" * 1500
    ids = [*tokenizer.encode(text), EOS]
    server = await serve(script=lambda request: ids, max_model_len=30_000)
    slow = await server.open_stream(CHAT, messages=MESSAGES, stream=True)
    quick = await server.events(CHAT, messages=MESSAGES)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in quick) == text
    await server.engine.until(lambda: not server.engine.live)  # both have run to their end
    await slow.head()
    body = b"".join(await slow.chunks())
    events = [json.loads(event[6:]) for event in body.decode().split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_failure_on_the_way_is_an_event_and_done_still_comes_last(serve, caplog):
    server = await serve("abc", paused=True)
    answer = await server.open_stream(CHAT, messages=MESSAGES, stream=True)
    await answer.head()
    server.engine.step()
    await answer.chunk()
    server.engine.fail("CUDA error at 0xdeadbeef")
    body = b"".join(await answer.chunks())
    event, done, end = body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "deadbeef" not in body.decode()
    assert "deadbeef" in caplog.text


async def test_a_failure_of_a_whole_answer_is_500(serve):
    server = await serve("abc", paused=True)
    asking = asyncio.create_task(server.chat())
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step()
    server.engine.fail("CUDA error at 0xdeadbeef")
    response = await asking
    assert response.status_code == 500
    assert "deadbeef" not in response.text


async def test_a_failed_choice_ends_its_siblings(serve):
    server = await serve("abc", paused=True)
    answer = await server.open_stream(CHAT, **ENDLESS, n=2)
    await server.engine.until(lambda: len(server.engine.live) == 2)
    failing = server.engine._live[0]
    server.engine._end(failing, FinishReason.ERROR)
    failing.stream.put(Output(0, [], FinishReason.ERROR, error="broken"))
    await answer.head()
    assert b"data: [DONE]" in b"".join(await answer.chunks())
    assert server.engine.live == []


async def test_requests_on_one_connection_follow_each_other(serve):
    server = await serve("ab")
    for _ in range(3):
        assert (await server.chat(stream=True)).text.endswith("data: [DONE]\n\n")
        assert (await server.chat()).status_code == 200
    metrics = (await server.http.get("/metrics")).text
    assert f'route="{CHAT}",status="200"}} 6.0' in metrics


# --- below the application ----------------------------------------------------------------------------------------


async def raw(server, *pieces: bytes) -> bytes:
    """Everything the server says to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for piece in pieces:
        writer.write(piece)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nno colon\r\n\r\n"])
async def test_what_is_no_http_gets_400_in_openais_shape(serve, garbage):
    server = await serve()
    head, _, body = (await raw(server, garbage)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert (await server.chat()).status_code == 200


@pytest.mark.parametrize(
    "start", [b"GET /health HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\n"], ids=["value", "url", "many"]
)
async def test_a_head_that_does_not_end_is_refused(serve, start):
    server = await serve()
    filler = b"a: b\r\n" if start.endswith(b"\n") else b"a"
    # Not a byte more than it takes: closing under a sender would reset the connection.
    endless = (start + filler * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1]
    answer = await raw(server, endless[:100], endless[100:])
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


async def test_a_large_head_that_ends_is_fine(serve):
    server = await serve()
    response = await server.http.get("/health", headers={f"x-{number}": "v" * 1000 for number in range(40)})
    assert response.status_code == 200
