"""Connections at their limits: heads, trailers, bodies, time and number, on bare sockets against the protocol that serves.

Nothing waits for time: `clients.deadlines` is told what hour it is. Memory is what the protocol itself counts and keeps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
from collections import Counter

import pytest

from runtime.api import QueueFull
from server.generate.generation import Generation
from server.http import protocol
from server.http.call import IncomingBody
from server.http.outlet import BodyWriter
from server.http.protocol import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MIN_BODY_BYTES,
    ConnectionPhase,
    HttpProtocol,
)
from server.http.sse import PING
from server.http.watch import ClientWatch
from tests.server.conftest import Running

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


def post(path: str = CHAT, framing: str = "Content-Length: 1000000", more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n{more}\r\n".encode()
    )


def request(body: bytes = BODY, more: str = "") -> bytes:
    return post(framing=f"Content-Length: {len(body)}", more=more) + body


CHUNKED = post(framing="Transfer-Encoding: chunked")


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def connections(server: Running) -> list[HttpProtocol]:
    """What the server has of its connections."""
    return [each for queue in server.clients.deadlines._queues.values() for each in queue]  # type: ignore[misc]


async def until(condition) -> None:
    """Lets the loop turn until `condition` holds: what it waits for is already on its way."""
    while not condition():  # noqa: ASYNC110 (what it looks at is changed by other callbacks, and signals nothing)
        await asyncio.sleep(0)


def code_of(body: bytes) -> str:
    return json.loads(body)["error"]["code"]


# --- heads --------------------------------------------------------------------------------------------------------


def head_of(size: int) -> bytes:
    """A request whose head has exactly so many bytes."""
    start, end = b"GET /version HTTP/1.1\r\nHost: localhost\r\nx: ", b"\r\n\r\n"
    return start + b"v" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_the_bound_is_the_heads_however_it_is_cut(serve, pieces):
    server = await serve()
    for size, status in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431)):
        client, head = await server.raw(), head_of(size)
        step = math.ceil(len(head) / pieces)
        for start in range(0, len(head), step):
            client.send(head[start : start + step])
            await asyncio.sleep(0)
        assert (await client.answer())[0] == status
        client.leave()


async def test_what_was_asked_before_too_large_a_head_gets_its_answer(serve):
    server = await serve()
    client = await server.raw()
    client.send(GET * 3 + head_of(MAX_HEAD_BYTES + 1))
    assert [(await client.answer())[0] for _ in range(4)] == [200, 200, 200, 431]
    assert await client.rest() == b""


async def test_pipelined_requests_of_more_than_a_head_are_answered_though_the_last_is_cut(serve):
    server = await serve()
    client = await server.raw()
    many = 2 * MAX_HEAD_BYTES // len(GET)
    client.send(GET * many + LAST[:20])
    for _ in range(many):
        assert (await client.answer())[0] == 200
    client.send(LAST[20:])
    assert (await client.answer())[0] == 200
    assert await client.rest() == b""


async def test_too_many_fields_are_refused_though_they_are_short(serve):
    server = await serve()
    client = await server.raw()
    client.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"x:\r\n" * MAX_FIELDS + b"\r\n")
    status, _, body = await client.answer()
    assert (status, code_of(body)) == (431, "headers_too_large")
    assert str(MAX_FIELDS) in json.loads(body)["error"]["message"]


async def test_empty_lines_before_a_request_are_no_request(serve):
    server = await serve()
    client = await server.raw()
    client.send(b"\r\n" * 50_000 + LAST)
    assert (await client.answer())[0] == 200


# --- trailers -----------------------------------------------------------------------------------------------------


async def test_trailers_go_no_further_than_the_protocol(serve):
    server = await serve("ab")
    client = await server.raw()
    client.send(CHUNKED + chunk(BODY) + b"0\r\nx-request-id: mine\r\nAuthorization: Bearer x\r\n\r\n" + GET)
    status, headers, _ = await client.answer()
    assert (status, headers["x-request-id"] == "mine") == (200, False)
    assert (await client.answer())[0] == 200


@pytest.mark.parametrize("trailers", [b"x:\r\n" * (MAX_FIELDS + 1), b"x: " + b"y" * (MAX_HEAD_BYTES + 8192)])
async def test_endless_trailers_end_the_request_in_its_apis_shape(serve, trailers):
    server = await serve()
    client = await server.raw()
    client.send(post("/v1/messages", framing="Transfer-Encoding: chunked") + chunk(BODY) + b"0\r\n")
    client.send(trailers)
    status, headers, body = await client.answer()
    assert (status, headers["connection"]) == (431, "close")
    assert json.loads(body)["type"] == "error"  # Anthropic's
    assert await client.rest() == b""


async def test_endless_trailers_behind_an_answer_end_the_connection_and_are_not_stored(serve):
    """One byte for 25 of ours, and before any key: the review's finding F3."""
    server = await serve(api_key=("secret",))
    client = await server.raw()
    client.send(CHUNKED + b"0\r\n")
    assert (await client.answer())[0] == 401
    [connection] = connections(server)
    stored = len(connection.headers)
    client.send(b"x:\r\n" * MAX_FIELDS)
    await client.rest()  # it has ended
    assert connection.headers is None or len(connection.headers) == stored
    assert server.clients.held_bytes == 0


async def test_chunk_extensions_without_end_are_refused(serve):
    server = await serve()
    client = await server.raw()
    client.send(CHUNKED + b"5;")
    client.send(b"x" * (MAX_HEAD_BYTES + 8192))
    assert (await client.answer())[0] == 431


# --- bodies -------------------------------------------------------------------------------------------------------


async def test_a_body_of_tiny_chunks_lets_others_have_their_turn(serve):
    server = await serve("ab", max_body_size=2**20)
    turns, work = [0], {}
    loop = asyncio.get_running_loop()
    parsing = True

    def tick() -> None:
        turns[0] += 1
        if parsing:
            loop.call_soon(tick)

    original = HttpProtocol.on_body

    def counted(self, body):
        work[turns[0]] = work.get(turns[0], 0) + 1
        original(self, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpProtocol, "on_body", counted)
        client = await server.raw()
        tick()
        client.send(CHUNKED)
        client.send(b"".join(chunk(b" ") for _ in range(50_000)) + chunk(BODY) + b"0\r\n\r\n")
        assert (await client.answer())[0] == 200
    parsing = False
    assert sum(work.values()) > 50_000
    a_piece = protocol.CHUNKED_PIECE_BYTES // 6 + 1
    assert max(work.values()) <= 2 * (protocol.CALLBACKS_A_TURN + a_piece)  # two reads may fall in one turn of ours


async def test_bodies_are_counted_until_they_are_decoded(serve):
    server = await serve("ab", paused=True)
    client = await server.raw()
    client.send(request()[:-10])
    await until(lambda: server.clients.held_bytes == len(BODY) - 10)
    client.send(request()[-10:])
    await server.engine.until(lambda: bool(server.engine.live))
    assert server.clients.held_bytes == 0  # though there is no answer yet


async def test_beyond_the_sum_the_largest_unfinished_body_is_refused_and_small_ones_get_through(serve):
    server = await serve("ab", max_body_size=400_000)
    server.clients.max_held_bytes = 950_000
    small, *large = [await server.raw() for _ in range(4)]
    small.send(request()[:-1])
    for number, client in enumerate(large):
        client.send(post(framing="Content-Length: 400000") + b" " * (300_000 + number))
    await until(lambda: server.clients.held_bytes > 900_000)
    large[0].send(b" " * 99_900)
    refused = large[0]
    status, headers, body = await refused.answer()
    assert (status, code_of(body), headers["connection"]) == (503, "service_unavailable", "close")
    assert int(headers["retry-after"]) >= 1
    assert server.clients.held_bytes < 700_000
    small.send(request()[-1:])
    assert (await small.answer())[0] == 200
    assert 'reason="service_unavailable"} 1.0' in (await server.http.get("/metrics")).text.replace(
        'engine="0",model_name="tiny",', ""
    )


async def test_a_client_that_leaves_in_its_body_gives_the_memory_back(serve):
    server = await serve()
    client = await server.raw()
    client.send(post() + b" " * 500_000)
    await until(lambda: server.clients.held_bytes >= 500_000)
    client.leave()
    await until(lambda: server.clients.num_connected == 0)
    assert server.clients.held_bytes == 0


async def test_what_nobody_reads_of_a_body_is_thrown_away_but_not_for_ever(serve):
    server = await serve(max_body_size=2000)
    server.clients.max_held_bytes = 100_000
    client = await server.raw()
    client.send(post() + b" " * 3000)
    assert (await client.answer())[0] == 413
    client.send(b" " * 150_000)
    assert await client.rest() == b""  # closed, and not reset before the 413 was read


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_full_queue_says_so_before_the_body_is_sent(serve, path):
    server = await serve()
    server.engine.refuse = QueueFull(256, 256, retry_after_s=7)
    client = await server.raw()
    client.send(post(path, more="Expect: 100-continue\r\n"))
    status, headers, _ = await client.answer()  # and no 100
    assert (status, headers["retry-after"]) == (429, "7")
    assert not server.engine.submitted


# --- time ---------------------------------------------------------------------------------------------------------


async def test_a_head_that_does_not_come_is_cut_off(serve):
    server = await serve()
    silent, slow = await server.raw(), await server.raw()
    slow.send(GET[:30])
    await until(lambda: server.clients.held_bytes == 30)
    server.clients.deadlines.expire(math.inf)
    assert await silent.rest() == b""
    status, _, body = await slow.answer()
    assert (status, code_of(body)) == (408, "request_timeout")
    assert await slow.rest() == b""


async def test_more_of_a_head_gives_it_no_more_time(serve):
    server = await serve()
    client = await server.raw()
    client.send(GET[:10])
    await until(lambda: server.clients.held_bytes == 10)
    [(_, due_s)] = [entry for queue in server.clients.deadlines._queues.values() for entry in queue.items()]
    client.send(GET[10:20])
    await until(lambda: server.clients.held_bytes == 20)
    server.clients.deadlines.expire(due_s)
    assert (await client.answer())[0] == 408


async def test_a_slow_head_behind_an_answer_is_cut_off_too(serve):
    server = await serve()
    client = await server.raw()
    client.send(GET + GET[:10])
    assert (await client.answer())[0] == 200
    await until(lambda: server.clients.held_bytes == 10)
    server.clients.deadlines.expire(math.inf)
    assert (await client.answer())[0] == 408


@pytest.mark.parametrize(("path", "shape"), [(CHAT, "error"), ("/v1/messages", "type")])
async def test_a_body_without_progress_is_408_in_the_apis_shape(serve, caplog, path, shape):
    caplog.set_level("INFO", "oneloop.access")
    server = await serve()
    client = await server.raw()
    client.send(post(path) + b" " * 100)
    await until(lambda: server.clients.held_bytes == 100)
    server.clients.deadlines.expire(math.inf)
    status, headers, body = await client.answer()
    assert (status, headers["connection"]) == (408, "close")
    assert shape in json.loads(body)
    assert f'"POST {path}" 408' in caplog.text
    assert await client.rest() == b""
    assert server.clients.held_bytes == 0


async def test_a_body_that_goes_on_has_time(serve):
    server = await serve("ab")
    client = await server.raw()
    body = b" " * MIN_BODY_BYTES + BODY
    client.send(post(framing=f"Content-Length: {len(body)}") + body[:MIN_BODY_BYTES])
    await until(lambda: server.clients.held_bytes == MIN_BODY_BYTES)
    server.clients.deadlines.expire(math.inf)
    client.send(body[MIN_BODY_BYTES:])
    assert (await client.answer())[0] == 200


async def test_a_body_that_nobody_reads_has_a_clock_too(serve):
    server = await serve(api_key=("secret",))
    client = await server.raw()
    client.send(post() + b" " * 100)
    assert (await client.answer())[0] == 401
    server.clients.deadlines.expire(math.inf)
    assert await client.rest() == b""


async def test_an_idle_connection_is_closed_after_its_time_and_an_answer_on_its_way_is_not(serve):
    server = await serve("ab", paused=True)
    idle, busy = await server.raw(), await server.raw()
    idle.send(GET)
    await idle.answer()
    busy.send(request())
    await server.engine.until(lambda: bool(server.engine.live))
    server.clients.deadlines.expire(math.inf)
    assert await idle.rest() == b""
    server.engine.step(3)
    assert (await busy.answer())[0] == 200


async def test_the_times_are_the_options(serve):
    server = await serve("ab", paused=True, timeout_head=3, timeout_body=4, timeout_keep_alive=5, timeout_write=6)
    [first, head, body, idle] = [await server.raw() for _ in range(4)]
    head.send(GET + GET[:5])
    body.send(post())
    idle.send(GET)
    await idle.answer()
    await head.answer()
    await until(lambda: server.clients.held_bytes == 5)
    spans = {span: len(queue) for span, queue in server.clients.deadlines._queues.items() if queue}
    assert spans == {3: 2, 4: 1, 5: 1}
    assert first


async def test_zero_is_no_limit(serve):
    server = await serve(timeout_head=0, timeout_body=0, timeout_keep_alive=0, timeout_write=0)
    client = await server.raw()
    client.send(GET + GET[:5])
    await client.answer()
    assert len(server.clients.deadlines) == 0


async def test_a_client_that_reads_nothing_is_cut_off_and_its_request_ends(serve, tokenizer):
    ids = tokenizer.encode("0123456789abcdef" * 100)
    server = await serve(script=lambda request: ids, max_model_len=10**7)
    client = await server.raw()
    client._writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(
        request(json.dumps({**json.loads(BODY), "stream": True, "max_tokens": 10**6, "ignore_eos": True}).encode())
    )
    await until(lambda: any(each._phase is ConnectionPhase.READER for each in connections(server)))
    while server.clients.num_connected:  # what the kernel still took of it counts as reading, the first time
        server.clients.deadlines.expire(math.inf)
        await asyncio.sleep(0)
    await server.engine.until(lambda: not server.engine.live)


async def test_thousands_overdue_at_once_are_ended_some_at_a_time(serve):
    server = await serve()
    clients = [await server.raw() for _ in range(120)]
    await until(lambda: server.clients.num_connected == 120)
    server.clients.deadlines.expire(math.inf)
    assert len(server.clients.deadlines) >= 120 - 50
    while any(each._phase is ConnectionPhase.HEAD for each in connections(server)):
        server.clients.deadlines.expire(math.inf)
    assert [await client.rest() for client in clients] == [b""] * 120


# --- number -------------------------------------------------------------------------------------------------------


async def test_connections_have_a_bound_in_all(serve):
    server = await serve(max_connections=2, max_connections_per_address=2)
    first, second = await server.raw(), await server.raw()
    await until(lambda: server.clients.num_connected == 2)
    third = await server.raw()
    status, headers, body = await third.answer()
    assert (status, code_of(body), headers["connection"]) == (503, "service_unavailable", "close")
    assert int(headers["retry-after"]) >= 1
    first.leave()
    await until(lambda: server.clients.num_connected == 1)
    fourth = await server.raw()
    fourth.send(LAST)
    assert (await fourth.answer())[0] == 200
    assert second


async def test_and_one_for_each_address(serve):
    server = await serve(max_connections=4)  # half of them for one
    here = [await server.raw() for _ in range(2)]
    await until(lambda: server.clients.num_connected == 2)
    status, headers, _ = await (await server.raw()).answer()
    assert (status, "retry-after" in headers) == (429, True)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
    writer.write(LAST)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert len(here) == 2


async def test_an_idle_connection_keeps_nothing_of_its_last_request(serve):
    server = await serve()
    client = await server.raw()
    client.send(GET)
    await client.answer()
    [connection] = connections(server)
    assert (connection.cycle, connection.scope, connection.headers, connection.held_bytes) == (None, None, None, 0)
    assert server.clients.deadlines._timer is not None  # one for all of them


async def test_tokens_that_are_there_before_their_reader_come_behind_the_head(serve):
    """Which waits for what the same turn of the loop writes."""
    server = await serve("abc", paused=True)
    submit = server.engine.submit

    def answering(*args, **options):
        stream = submit(*args, **options)
        server.engine.step()
        return stream

    server.engine.submit = answering
    client = await server.raw()
    body = json.dumps({**json.loads(BODY), "stream": True, "max_tokens": 2}).encode()
    client.send(request(body, "Connection: close\r\n"))
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step()
    received = await client.rest()
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    _, _, chunks = received.partition(b"\r\n\r\n")
    assert chunks.index(b'"role"') < chunks.index(b'"content":"a"') < chunks.index(b'"content":"b"')


# --- pipelining ---------------------------------------------------------------------------------------------------


async def test_answers_come_in_the_order_of_requests_and_none_is_lost_at_the_close(serve):
    server = await serve("ab", paused=True)
    client = await server.raw()
    client.send(
        request() + b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" + request(b"{") + LAST + b"what is this?"
    )
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(3)
    assert [(await client.answer())[0] for _ in range(4)] == [200, 404, 400, 200]
    assert await client.rest() == b""


async def test_a_head_leaves_with_the_body_behind_it_unless_that_comes_later(serve):
    server = await serve()
    client = await server.raw()
    client.send(GET)
    await client.answer()
    (connection,) = connections(server)
    writes: list[bytes] = []
    transport = connection.transport

    class Noting:
        def __getattr__(self, name):
            return getattr(transport, name)

        def write(self, data):
            writes.append(bytes(data))
            transport.write(data)

    connection.transport = Noting()
    client.send(GET)
    _, _, body = await client.answer()
    assert [data.startswith(b"HTTP/1.1 200") and data.endswith(body) for data in writes] == [True]
    writes.clear()
    client.send(b"HEAD" + GET[3:])
    await until(lambda: writes)
    assert [data.endswith(b"\r\n\r\n") for data in writes] == [True]
    writes.clear()
    streamed = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    client.send(request(streamed, "Expect: 100-continue\r\n"))
    await until(lambda: writes and writes[-1].endswith(b"0\r\n\r\n"))
    assert writes[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert writes[1].startswith(b"HTTP/1.1 200")
    assert sum(data.startswith(b"HTTP/1.1") for data in writes) == 2


async def test_an_error_waits_for_the_answers_before_it(serve):
    server = await serve("ab", paused=True)
    client = await server.raw()
    client.send(request() + b"GARBAGE\r\n\r\n")
    await server.engine.until(lambda: bool(server.engine.live))
    server.engine.step(3)
    assert [(await client.answer())[0] for _ in range(2)] == [200, 400]


async def test_what_is_pipelined_behind_an_answer_waits_unparsed_and_bounded(serve):
    """Parsed requests take a hundred times their bytes; they were parsed as they came, while a stream ran."""
    server = await serve("ab", paused=True, ping_interval=0.001)
    client = await server.raw()
    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    client.send(request(body))
    await server.engine.until(lambda: bool(server.engine.live))
    client.send(GET * 200_000)
    await until(lambda: server.clients.held_bytes > 65_536)
    [connection] = [each for each in server_connections(server) if each.cycle is not None]
    assert connection.flow.read_paused
    for _ in range(20):  # pings ask for more from the client, each time
        await client._reader.readuntil(chunk(PING))
    assert server.clients.held_bytes <= 65_536 + 2**18
    assert not connection.pipeline
    client.leave()
    server.engine.step(3)


def server_connections(server: Running) -> list[HttpProtocol]:
    return list(server.clients._holders)  # type: ignore[arg-type]


async def test_an_offer_to_upgrade_takes_neither_the_body_nor_the_next_request(serve):
    """Java's HttpClient sends these with every first request."""
    server = await serve("ab")
    client = await server.raw()
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    client.send(request(more=offer))
    assert (await client.answer())[0] == 200
    client.send(GET)
    assert (await client.answer())[0] == 200
    chunked = post(framing="Transfer-Encoding: chunked", more=offer) + chunk(BODY) + b"0\r\n\r\n"
    client.send(chunked + GET.replace(b"\r\n\r\n", b"\r\n" + offer.encode() + b"\r\n") + LAST)
    assert [(await client.answer())[0] for _ in range(3)] == [200, 200, 200]
    assert await client.rest() == b""


async def test_a_refusal_is_read_by_a_client_that_is_still_sending(serve):
    server = await serve(api_key=("secret",))
    client = await server.raw()
    client.send(post(more="Connection: close\r\n") + b" " * 300_000)
    assert (await client.answer())[0] == 401
    client.send(b" " * 300_000)  # into a closed socket this would be a reset
    assert await client.rest() == b""


# --- what is left ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def uncollected():
    """Nothing is looked for that keeps itself alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def objects(*kinds: type) -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


@pytest.mark.parametrize("origins", [(), ("*",)])
@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_request_nothing_is_left_that_only_a_collection_would_free(serve, origins, stream):
    server = await serve(cors_origin=origins)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).encode()
    kinds = (Generation, ClientWatch, HttpProtocol, BodyWriter, IncomingBody)
    with uncollected():
        before = objects(*kinds)
        client = await server.raw()
        client.send(request(body, "Connection: close\r\n"))
        assert b" 200 " in (await client.rest())[:16]
        client.leave()
        while server.clients.num_connected:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert objects(*kinds) == before


# --- the log ------------------------------------------------------------------------------------------------------


async def test_a_long_path_is_cut_in_the_log(serve, caplog):
    caplog.set_level("INFO", "oneloop.access")
    server = await serve()
    client = await server.raw()
    client.send(b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await client.answer())[0] == 404
    [line] = [record.getMessage() for record in caplog.records if '" 404 ' in record.getMessage()]
    assert len(line) < 400
