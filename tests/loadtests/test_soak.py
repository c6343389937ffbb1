"""The soak: the same seed sends the same, every answer is judged, and whatever is left behind is complained of."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from loadtests.soak import Seen, Tally, complaints, slope_mib_per_minute
from loadtests.soak_requests import BAD_BODIES, SoakRequest, fault_of, requests

ARGS = argparse.Namespace(max_growth_mib=32.0)
BEFORE = Seen(0.0, 500.0, 16, 4), {"event_loop_tasks": 4.0}
AFTER = replace(BEFORE[0], num_threads=30), {
    "num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0, "request_success_total": 9.0,
    "request_params_n_sum": 9.0, "e2e_request_latency_seconds_count": 9.0, "event_loop_tasks": 4.0,
}  # fmt: skip


def test_a_seed_says_what_is_sent_and_everything_is_in_it():
    sent = [*islice(requests(3, "m", 512), 3000)]
    assert sent == [*islice(requests(3, "m", 512), 3000)]
    assert sent != [*islice(requests(4, "m", 512), 3000)]
    kinds = Counter(word for request in sent for word in request.kind.split())
    assert kinds.keys() == {
        "chat/completions", "completions", "responses", "messages", "stream", "leaves", "bad", "n=3", "structured", "stop",
        "logprobs",
    }  # fmt: skip
    assert {request.path for request in sent if not request.is_bad} | {path for path, _ in BAD_BODIES} == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/no/such/path",
    }  # fmt: skip
    assert all(json.loads(request.body)["model"] == "m" for request in sent if not request.is_bad)
    assert len({request.body for request in sent if request.is_bad}) == len({body for _, body in BAD_BODIES})


CHAT = SoakRequest("chat", "/v1/chat/completions", b"{}")
STREAM = replace(CHAT, streams=True)
BAD = replace(CHAT, is_bad=True)


@pytest.mark.parametrize(
    ("request_", "status", "body", "word"),
    [
        (CHAT, 200, b'{"choices":[]}', None),
        (CHAT, 200, b'{"choices":[', "not JSON"),
        (CHAT, 200, b'{"error":{"message":"x"}}', "an error with HTTP 200"),
        (CHAT, 500, b"{}", "HTTP 500"),
        (CHAT, 0, b"", "HTTP 0"),
        (CHAT, 429, b"{}", None),
        (STREAM, 200, b'data: {"x":1}\n\ndata: [DONE]\n\n', None),
        (STREAM, 200, b'data: {"x":1}\n\n', "did not end"),
        (STREAM, 200, b'data: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n', "an error event"),
        (replace(STREAM, path="/v1/messages"), 200, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', None),
        (BAD, 400, b"{}", None),
        (BAD, 404, b"{}", None),
        (BAD, 200, b"{}", "for a bad body"),
        (BAD, 500, b"{}", "for a bad body"),
    ],
)
def test_every_answer_is_judged(request_, status, body, word):
    fault = fault_of(request_, status, body)
    assert fault is None if word is None else word in fault


def complained(tally=None, seen=AFTER[0], growth=0.0, log="", code=0, **changes) -> list[str]:
    found = AFTER[1] | {name.replace("__", "."): value for name, value in changes.items()}
    return [*complaints(tally or Tally(), BEFORE, (seen, found), growth, ARGS, log, code)]


def test_nothing_is_left_to_complain_of():
    assert complained() == []


@pytest.mark.parametrize(
    ("left", "word"),
    [
        ({"tally": Tally(losses=["chat: HTTP 500"])}, "1 answers"),
        ({"num_requests_running": 1.0}, "num_requests_running is 1"),
        ({"kv_cache_usage_perc": 0.01}, "kv_cache_usage_perc"),
        ({"request_success_total": 8.0}, "9 sequences were submitted, 8 ended"),
        ({"request_success_total__error": 1.0}, "ended with an error"),
        ({"event_loop_tasks": 5.0}, "5 tasks"),
        ({"seen": replace(AFTER[0], num_descriptors=17)}, "17 descriptors"),
        ({"growth": 33.0}, "memory grew by 33 MiB"),
        ({"log": "x ERROR oneloop: bad"}, "1 errors in the log"),
        ({"code": None}, "SIGTERM"),
        ({"code": 71}, "71"),
    ],
)
def test_whatever_is_left_behind_is_complained_of(left, word):
    (line,) = complained(**left)
    assert word in line


def test_memory_that_grows_while_pools_fill_is_no_leak_and_what_grows_afterwards_is():
    fills = [Seen(60.0 * minute, 500 + min(100, 50 * minute), 16, 4) for minute in range(10)]
    assert slope_mib_per_minute(fills) == pytest.approx(0.0)
    leaks = [Seen(60.0 * minute, 500 + 7 * minute, 16, 4) for minute in range(10)]
    assert slope_mib_per_minute(leaks) == pytest.approx(7.0)
