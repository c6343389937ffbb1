"""`oneloop ray` as a user has it: Ray Serve on this machine, two replicas of the built-in model, one ingress.

One deployment for all tests, in the order of the file: each leaves two replicas to the next, and the last one ends it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

KEY = "the-key"
MODEL = "smollm2-135m-instruct"
NUM_REQUESTS, NUM_DONE_BEFORE = 200, 30
CHAT = {"messages": [{"role": "user", "content": "Count to a hundred."}], "ignore_eos": True, "stream": True}
# Of three APIs: what to ask, what the end of a stream looks like, and what in the place of it where its replica is gone.
ASKS = (
    ("/v1/chat/completions", {**CHAT, "max_tokens": 12}, r"data: \[DONE\]", r'"code":"replica_lost"\}\}\n\ndata: \[DONE\]'),
    ("/v1/messages", {**CHAT, "model": MODEL, "max_tokens": 12}, '"type":"message_stop"', '"type":"overloaded_error"'),
    (
        "/v1/responses", {"input": "Count to a hundred.", "max_output_tokens": 12, "stream": True},
        r"event: response\.(completed|incomplete)\n", r'event: error\ndata: \{.*"code":"replica_lost"',
    ),
)  # fmt: skip
REFUSED = re.compile('"code":"replica_lost"|"type":"overloaded_error"')  # before it had begun


@pytest.fixture(scope="module")
def served(start_for_module) -> Any:
    server = start_for_module(
        "--replicas", "2", "--max-num-seqs", "16", "--api-key", KEY, "--log-level", "info",
        "--drain-timeout", "3600",  # however slow the machine is
        command=["ray"],
    )  # fmt: skip
    server.wait_until_said("oneloop serves on")
    return server


def replicas_of(server) -> dict[str, int]:
    """Names of the replicas that were begun, and their processes."""
    pattern = re.compile(r"replica (\w+) serves \S+ \(process (\d+)\)")
    return {found[1]: int(found[2]) for found in map(pattern.search, list(server.log)) if found}


def metric(server, name: str) -> dict[str, float]:
    """Of each replica that answers."""
    page = httpx.get(server.base + "/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=None).text
    found = re.findall(rf'^{re.escape(name)}{{replica="(\w+)"[^}}]*}} (\S+)$', page, re.MULTILINE)
    totals: dict[str, float] = {}
    for replica, value in found:
        totals[replica] = totals.get(replica, 0) + float(value)
    return totals


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key=KEY, max_retries=0)


def test_keys_and_streams_survive_the_proxy(served):
    with openai.OpenAI(base_url=served.base + "/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"
    with client_of(served) as client:
        stream = client.chat.completions.create(model=MODEL, max_tokens=8, **CHAT_OF_OPENAI)
        chunks = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
        raw = client.models.with_raw_response.list()
    assert len(chunks) > 3  # as it comes, not all at once; on a machine that is busy a chunk may have several tokens
    assert len(raw.headers.get_list("x-request-id")) == len(raw.headers.get_list("date")) == 1


CHAT_OF_OPENAI = {"messages": CHAT["messages"], "stream": True, "extra_body": {"ignore_eos": True}}


def test_a_prompt_goes_where_its_beginning_is_cached(served):
    text = "The harbour master keeps a log of every ship that comes in. " * 20
    cached = []
    with client_of(served) as client:
        for _ in range(6):
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1
            )
            cached.append(answer.usage.prompt_tokens_details.cached_tokens > 100)  # more than the template's beginning
    assert cached == [False, True, True, True, True, True]


def test_a_client_that_leaves_ends_its_request(served):
    with client_of(served) as client:
        stream = client.chat.completions.create(model=MODEL, max_tokens=4000, **CHAT_OF_OPENAI)
        next(iter(stream))
        assert sum(metric(served, "oneloop:num_requests_running").values()) == 1
        stream.close()
        while sum(metric(served, "oneloop:num_requests_running").values()):
            time.sleep(0.02)  # a request that goes on would go on for minutes: the test's own limit


async def one(client: httpx.AsyncClient, number: int, done: list[int], enough: asyncio.Event) -> tuple[int, int, str]:
    kind = number % len(ASKS)
    path, body, _, _ = ASKS[kind]
    answer = await client.post(path, json=body)
    done.append(number)
    if len(done) == NUM_DONE_BEFORE:
        enough.set()
    return kind, answer.status_code, answer.text


async def test_of_200_streams_those_of_a_killed_replica_say_so_and_all_others_finish(served):
    before = metric(served, "oneloop:num_requests_running")
    assert len(before) == 2
    victim = min(before)
    done: list[int] = []
    enough = asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=served.base, timeout=None, limits=limits, headers=headers) as client:
        asked = [asyncio.create_task(one(client, number, done, enough)) for number in range(NUM_REQUESTS)]
        await enough.wait()
        os.kill(replicas_of(served)[victim], signal.SIGKILL)
        answers = await asyncio.gather(*asked)
    finished, cut, refused = 0, 0, 0
    for kind, status, text in answers:
        _, _, end, error = ASKS[kind]
        last = text.rstrip().removesuffix("data: [DONE]").rstrip().rpartition("\n\n")[2] + text[-20:]
        if status == 503:
            refused += 1
            assert REFUSED.search(text), text
        elif re.search(error, text):
            cut += 1
            assert status == 200
        else:
            finished += 1
            assert status == 200, text
            assert re.search(end, last), text
    print(f"{finished} finished, {cut} ended with an error, {refused} were refused")
    assert finished >= NUM_DONE_BEFORE
    assert cut
    while len(now := metric(served, "oneloop:num_requests_running")) < 2 or victim in now:
        time.sleep(0.1)  # noqa: ASYNC251 (nothing else goes on; the test's own limit)
    with client_of(served) as again:
        assert again.chat.completions.create(model=MODEL, messages=CHAT["messages"], max_tokens=1)


def test_the_first_signal_lets_streams_finish_and_leaves_nothing_behind(served):
    processes = psutil.Process(served.process.pid).children(recursive=True)
    assert len(processes) > 4
    pieces: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with client_of(served) as client:
            for chunk in client.chat.completions.create(model=MODEL, max_tokens=200, **CHAT_OF_OPENAI):
                pieces.extend(choice.finish_reason or "" for choice in chunk.choices)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    served.process.send_signal(signal.SIGTERM)
    reader.join()
    assert pieces[-1] == "length"
    assert served.process.wait() == 0
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
