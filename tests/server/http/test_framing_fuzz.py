"""HTTP framing, fuzzed: however bytes are cut and whatever they are, every connection ends, nothing is kept of it, no answer is a
500, and the next client is served."""

from __future__ import annotations

import asyncio
import json
import math
import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.http.protocol import ConnectionPhase

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
CHUNKS = b"4;ext=1\r\n" + CHAT[:4] + b"\r\n%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(CHAT) - 4, CHAT[4:])
MESSAGES = (
    GET,
    b"\r\nHEAD /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: %d\r\n\r\n" % len(CHAT) + CHAT,
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS,
    b"POST /v1/messages HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{}",
    b"POST /nothing HTTP/1.1\r\n" + HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\n12345",
    b"GET http://localhost/version HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
)
WORDS = (
    b"\r\n", b"\r\n\r\n", b"\n", b"\0", b":", b" ", b"0\r\n", b"ffffffffffffffff\r\n", b"Content-Length: 5\r\n", b"HTTP/1.1",
    b"Transfer-Encoding: chunked\r\n", b"Host: localhost\r\n", b"Connection: close\r\n", b"PRI * HTTP/2.0\r\n\r\n",
)  # fmt: skip

pytestmark = pytest.mark.hypothesis  # nightly by its profile, too


async def exchange(server, pieces: list[bytes], *, ends_by_itself: bool) -> bytes:
    """Everything the server says to `pieces`, on one connection, until it ends: by itself, or because time is over."""
    client = await server.raw()
    for piece in pieces:
        client.send(piece)
        await asyncio.sleep(0)
    ending = asyncio.create_task(client.rest())
    for _ in range(20):  # turns of the loop in which it is read; where they are too few, its time is over sooner
        await asyncio.sleep(0)
    while not ending.done():
        waiting = {each._phase for queue in server.clients.deadlines._queues.values() for each in queue}
        if not ends_by_itself and waiting - {ConnectionPhase.CLOSING}:
            server.clients.deadlines.expire(math.inf)
        await asyncio.sleep(0)
    client.leave()
    while server.clients.num_connected:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return b"" if isinstance(ending.exception(), ConnectionResetError) else ending.result()


def statuses(answers: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", answers) if code != b"100"]


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted({each % len(data) for each in at} - {0}), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def test_answers_do_not_depend_on_how_bytes_are_cut(lasting):
    runner, server = lasting
    whole = {
        (message, *behind): statuses(runner.run(exchange(server, [message, *behind, LAST], ends_by_itself=True)))
        for message in MESSAGES
        for behind in ((), (GET,))
    }
    assert all(
        len(found) == (1 if b"HTTP/1.0" in message else 2 + len(behind)) for (message, *behind), found in whole.items()
    )

    @given(st.sampled_from(sorted(whole)), st.lists(st.integers(0, 10_000), max_size=12))
    def check(messages, at):
        pieces = cut(b"".join(messages) + LAST, at)
        assert statuses(runner.run(exchange(server, pieces, ends_by_itself=True))) == whole[messages]
        assert server.clients.held_bytes == 0

    check()


@st.composite
def broken(draw) -> bytes:
    """Requests with bytes put in, taken out and exchanged."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 8))
        data[at : at + size] = draw(st.one_of(st.sampled_from(WORDS), st.binary(max_size=8)))
    return bytes(data)


def test_broken_framing_ends_every_connection_and_hurts_nobody(lasting):
    runner, server = lasting

    @given(broken(), st.lists(st.integers(0, 10_000), max_size=4))
    @example(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 3000, [])
    @example(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + GET, [])
    @example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [])
    @example(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n" + GET, [])
    @example(b"GET / HTTP/1.1\nHost: localhost\n\n" + GET, [])
    def check(data, at):
        answers = runner.run(exchange(server, cut(data, at), ends_by_itself=False))
        assert all(status < 500 for status in statuses(answers)), answers
        assert server.clients.held_bytes == 0
        assert server.clients.num_connected == 0
        assert not server.engine.live

    check()
    assert statuses(runner.run(exchange(server, [LAST], ends_by_itself=True))) == [200]
