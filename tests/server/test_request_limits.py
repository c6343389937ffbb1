"""Limits on requests over HTTP: their time, in a field, a header and an option; and how refusals look in each API."""

from __future__ import annotations

import pytest

from runtime.api import CallerLimit, FinishReason, QueueFull

MESSAGE = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGE},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGE, "model": "tiny", "max_tokens": 5},
}


def seconds_given(server) -> float | None:
    request = server.engine.submitted[-1]
    return None if request.deadline_s is None else pytest.approx(request.deadline_s - request.arrival_s)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("option", "header", "field", "expected"),
    [
        (None, None, None, None),
        (60.0, None, None, 60.0),
        (60.0, "2.5", None, 2.5),
        (60.0, None, 90, 90.0),
        (None, "7", 3, 3.0),
        (None, "3", 7, 3.0),
    ],
)
async def test_the_shorter_of_field_and_header_counts_else_the_server_s(serve, path, option, header, field, expected):
    server = await serve(request_timeout=option)
    headers = {} if header is None else {"X-Request-Timeout": header}
    body = ROUTES[path] | ({} if field is None else {"timeout": field})
    assert (await server.post(path, body, headers=headers)).status_code == 200
    assert seconds_given(server) == expected


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1e3", "86401", "", "5s"])
async def test_a_header_that_is_no_time_is_refused(serve, text):
    server = await serve()
    answer = await server.post("/v1/completions", {"prompt": "Hi"}, headers={"X-Request-Timeout": text})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"
    assert not server.engine.submitted


@pytest.mark.parametrize("value", [0, -1, "5", 86401])
async def test_a_field_that_is_no_time_is_refused(serve, value):
    server = await serve()
    answer = await server.complete(timeout=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("path", ROUTES)
async def test_an_answer_that_is_late_is_504_and_nobody_should_try_again(serve, path):
    server = await serve(paused=True)
    answer = await server.while_it_waits(path, ROUTES[path], server.engine.time_out)
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"
    assert "time was over" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
async def test_who_waited_too_long_in_the_queue_gets_503_and_when_to_come_again(serve, path):
    server = await serve(paused=True)
    answer = await server.while_it_waits(path, ROUTES[path], lambda: server.engine.time_out(retry_after_s=6.2))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_that_is_late_says_so_in_its_last_event(serve, path):
    server = await serve(paused=True)
    body = ROUTES[path] | {"stream": True}
    answer = await server.while_it_waits(path, body, lambda: (server.engine.step(), server.engine.time_out()))
    assert answer.status_code == 200  # which was said before
    assert "time was over" in answer.text.rpartition("data: {")[2]
    assert server.engine.ended[-1][1] is FinishReason.TIMEOUT


@pytest.mark.parametrize(
    ("error", "seconds", "words"),
    [
        (QueueFull(9, 9, retry_after_s=3.4), "4", "9 requests are waiting"),
        (QueueFull(900, 800, unit="prompt tokens", retry_after_s=12.0), "12", "900 prompt tokens are waiting"),
        (CallerLimit("this client has used its tokens", "x", 0.2), "1", "this client has used its tokens"),
    ],
)
async def test_who_is_refused_learns_why_and_when_to_come_again(serve, error, seconds, words):
    server = await serve()
    server.engine.refuse = error
    answer = await server.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, seconds)
    assert words in answer.json()["error"]["message"]


async def test_more_sequences_than_a_key_may_have_are_refused_for_good(serve):
    server = await serve(max_num_seqs_per_key=3)
    answer = await server.complete(n=4)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert (await server.complete(n=3)).status_code == 200
