"""Bytes to answers: framing, events, counts, and what counts as an error."""

from __future__ import annotations

import json

import pytest

from loadtests.answers import ChunkedBody, HttpResponse, SseData, read_answer
from loadtests.exchange import Recording
from tests.loadtests.scripted_server import DONE, HEAD, event

EVENTS = event("a") + b": ping\n\n" + event("b") + event(usage={"prompt_tokens": 5, "completion_tokens": 9}) + DONE


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"


def recorded(*pieces: bytes, failure: str | None = None) -> Recording:
    """Sent at 10 s; pieces arrive at 11, 12, … s."""
    return Recording(10.0, [11.0 + index for index in range(len(pieces))], list(pieces), failure)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 10_000])
def test_an_answer_reads_the_same_however_the_network_cuts_it(step):
    raw = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nContent-Type: text/event-stream\r\n\r\n"
        + chunked(EVENTS, 13)
    )
    found = read_answer(recorded(*(raw[at : at + step] for at in range(0, len(raw), step))), "chat")
    assert (found.error, len(found.content_s), found.num_output_tokens, found.num_prompt_tokens) == (None, 2, 9, 5)


def test_each_event_has_the_moment_at_which_its_last_byte_came():
    a, b = event("a"), event("b")
    found = read_answer(recorded(HEAD + a[:9], a[9:] + b[:-1], b[-1:] + DONE), "chat")
    assert found.content_s == (12.0, 13.0)
    assert (found.ttft_s, found.itl_s, found.e2e_s) == (2.0, [1.0], 3.0)


def test_events_may_end_lines_with_crlf_and_spread_data_over_lines():
    assert list(SseData().feed(b"event: x\r\ndata: a\r\ndata:b\r\n\r\n: comment\r\n\r\nid: 1\r\n\r\ndata: c")) == [
        b"a\nb"
    ]


def test_an_event_without_text_is_no_token_yet():
    empty = event("") + event(None) + b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    found = read_answer(recorded(HEAD + empty, event("a"), DONE), "chat")
    assert found.content_s == (12.0,)


def test_reasoning_counts_as_content():
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
    assert read_answer(recorded(HEAD, thought, DONE), "chat").ttft_s == 2.0


def test_completions_are_read_from_text():
    piece = b'data: {"choices": [{"text": "hi", "finish_reason": "length"}]}\n\n'
    assert read_answer(recorded(HEAD, piece), "completions").content_s == (12.0,)


def test_tokens_are_counted_by_usage_and_cached_ones_too():
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
    found = read_answer(recorded(HEAD, event("abc"), event(usage=usage), DONE), "chat")
    assert (found.num_output_tokens, found.num_cached_tokens, found.counted_by_usage) == (3, 32, True)


def test_without_usage_events_with_content_are_counted():
    found = read_answer(recorded(HEAD, event("a"), event("b", usage=None), DONE), "chat")
    assert (found.num_output_tokens, found.counted_by_usage) == (2, False)


def test_tpot_shares_the_time_after_the_first_event_among_all_later_tokens():
    found = read_answer(
        recorded(HEAD, event("a"), event("b"), event("c", usage={"completion_tokens": 5}), DONE), "chat"
    )
    assert found.tpot_s == pytest.approx(2.0 / 4)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_tpot_has_no_value_when_everything_came_at_once(num_tokens):
    found = read_answer(recorded(HEAD, event("all", usage={"completion_tokens": num_tokens}), DONE), "chat")
    assert found.error is None
    assert found.tpot_s is None


@pytest.mark.parametrize(
    ("recording", "reason"),
    [
        (recorded(), "closed without an answer"),
        (recorded(failure="ConnectionRefusedError: no"), "ConnectionRefusedError"),
        (recorded(b"HTTP/1.1 20"), "closed without an answer"),
        (recorded(b"SSH-2.0-OpenSSH\r\n\r\n"), "not HTTP"),
        (
            recorded(b"HTTP/1.1 429 Slow down\r\n\r\n", b'{"error": {"message": "queue ', b'is full"}}'),
            "HTTP 429: queue is full",
        ),
        (recorded(b"HTTP/1.1 500 Oh\r\n\r\nTraceback"), "HTTP 500: Traceback"),
        (recorded(HEAD, DONE), "no content"),
        (recorded(HEAD, event("a")), "ended before its end"),
        (recorded(HEAD, event("a"), DONE, failure="ConnectionResetError: "), "ConnectionResetError"),
        (recorded(HEAD, event("a"), event(error={"message": "out of memory"})), "error event: out of memory"),
        (recorded(HEAD, b"data: {oops\n\n"), "not JSON"),
        (recorded(HEAD, b"data: [1]\n\n"), "not an object"),
        (recorded(HEAD, b'data: {"choices": [7]}\n\n'), "unexpected shape"),
        (recorded(HEAD, b'data: {"choices": [], "usage": 7}\n\n'), "unexpected shape"),
        (recorded(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"), "broken chunked"),
    ],
)
def test_a_broken_answer_is_an_error_that_says_why(recording, reason):
    found = read_answer(recording, "chat")
    assert found.error is not None
    assert reason in found.error


def test_a_refusal_in_json_of_another_shape_is_still_shown():
    body = json.dumps({"detail": "nope"}).encode()
    assert "nope" in (read_answer(recorded(b"HTTP/1.1 404 x\r\n\r\n" + body), "chat").error or "")


def test_chunked_body_says_when_it_has_ended():
    body = ChunkedBody()
    assert body.feed(b"3\r\nab") == b""
    assert body.feed(b"c\r\n0\r\n") == b"abc"
    assert body.ended


def test_a_body_without_chunked_coding_passes_through():
    response = HttpResponse()
    assert response.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n5\r\nab") == b"5\r\nab"
    assert response.status == 200
