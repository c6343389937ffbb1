"""EventStream over bare ASGI callables: what is sent, and that the source behind it is always left."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from server.http.call import Call
from server.http.sse import DONE, PING, EventStream
from server.http.watch import ClientWatch

SCOPE = {"type": "http", "method": "POST"}


class ManualSource:
    """Yields what the test gives it; `left` tells that its block was left."""

    def __init__(self, *items: str) -> None:
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        for item in items:
            self.queue.put_nowait(item)
        self.waiting = asyncio.Event()
        self.left = False

    def end(self) -> None:
        self.queue.put_nowait(None)

    async def __aenter__(self) -> ManualSource:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.left = True

    async def hand_to(self, take, writer_of=None) -> None:
        while (item := await self._next()) is not None:
            if (rest := take(item)) is not None:
                await rest()

    async def _next(self) -> str | None:
        if self.queue.empty():
            self.waiting.set()
        item = await self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item


class UpperFrames:
    def feed(self, item: str) -> bytes:
        if item == "bad":
            raise ValueError("no such thing")
        return f"data: {item.upper()}\n\n".encode() if item else b""

    def end(self) -> bytes:
        return b"data: usage\n\n"

    def fail(self, error: Exception) -> bytes:
        return f"data: error {error}\n\n".encode()


class Client:
    """The server's side of a connection: what was sent, and when the client leaves or stops reading."""

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.blocked = asyncio.Event()
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        if not self.reading.is_set():
            self.blocked.set()
            await self.reading.wait()
        self.messages.append(message)
        if message["type"] == "http.response.body":
            self.arrived.put_nowait(message["body"])

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]


@pytest.fixture
def client() -> Client:
    return Client()


def stream_of(source: ManualSource, ping_interval_s: float = 0) -> EventStream[str]:
    return EventStream(lambda: source, UpperFrames(), ping_interval_s=ping_interval_s)


async def rounds(num: int = 10) -> None:
    """Lets everything that can run do so."""
    for _ in range(num):
        await asyncio.sleep(0)


async def test_events_leave_one_by_one_and_done_is_last(client):
    source = ManualSource("a", "", "b")
    source.end()
    await stream_of(source)({**SCOPE}, client.receive, client.send)
    assert client.bodies == [b"data: A\n\n", b"data: B\n\n", b"data: usage\n\n" + DONE]
    assert [message.get("more_body") for message in client.messages] == [None, True, True, False]
    assert source.left


async def test_headers_forbid_caching_and_buffering(client):
    source = ManualSource()
    source.end()
    await stream_of(source)({**SCOPE}, client.receive, client.send)
    start = client.messages[0]
    assert start["status"] == 200
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"


@pytest.mark.parametrize("broken", ["bad", ValueError("no such thing")], ids=["rendering", "source"])
async def test_an_error_on_the_way_becomes_an_event_and_done(client, broken):
    source = ManualSource("a")
    source.queue.put_nowait(broken)
    await stream_of(source)({**SCOPE}, client.receive, client.send)
    assert client.bodies == [b"data: A\n\n", b"data: error no such thing\n\n" + DONE]
    assert source.left


async def test_a_source_that_refuses_leaves_the_answer_to_others(client):
    def refuse() -> ManualSource:
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        await EventStream(refuse, UpperFrames(), ping_interval_s=0)({**SCOPE}, client.receive, client.send)
    assert client.messages == []


async def test_a_client_that_leaves_while_no_token_flows_ends_the_stream_at_once(client):
    source = ManualSource("a")
    response = asyncio.create_task(stream_of(source)({**SCOPE}, client.receive, client.send))
    await source.waiting.wait()
    assert not source.left
    client.gone.set()
    await response
    assert source.left
    assert client.bodies == [b"data: A\n\n"]


async def test_a_client_that_leaves_while_send_is_blocked_ends_the_stream_at_once(client):
    source = ManualSource("a", "b")
    client.reading.clear()
    response = asyncio.create_task(stream_of(source)({**SCOPE}, client.receive, client.send))
    await client.blocked.wait()
    client.gone.set()
    await response
    assert source.left


async def test_cancellation_from_outside_frees_the_source_and_goes_on(client):
    source = ManualSource("a")
    response = asyncio.create_task(stream_of(source)({**SCOPE}, client.receive, client.send))
    await source.waiting.wait()
    response.cancel()
    with pytest.raises(asyncio.CancelledError):
        await response
    assert source.left


async def test_cancellation_that_meets_a_departure_still_goes_on(client):
    source = ManualSource("a")
    response = asyncio.create_task(stream_of(source)({**SCOPE}, client.receive, client.send))
    await source.waiting.wait()
    client.gone.set()
    response.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await response
    assert response.cancelled()
    assert source.left


async def test_a_slow_reader_blocks_only_itself(client):
    slow, quick = Client(), client
    slow.reading.clear()
    sources = [ManualSource("a", "b"), ManualSource("a", "b")]
    responses = [
        asyncio.create_task(stream_of(source)({**SCOPE}, reader.receive, reader.send))
        for source, reader in zip(sources, (slow, quick), strict=True)
    ]
    await slow.blocked.wait()
    sources[1].end()
    await responses[1]
    assert quick.bodies[:2] == [b"data: A\n\n", b"data: B\n\n"]
    assert slow.messages == []
    sources[0].end()
    slow.reading.set()
    await responses[0]
    assert slow.bodies == quick.bodies


class ManualClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)

    async def advance(self, seconds: float) -> None:
        self.now_s += seconds
        await rounds()


async def test_silence_is_broken_by_a_ping_also_before_the_first_token(client, monkeypatch):
    clock = ManualClock(monkeypatch)
    source = ManualSource()
    response = asyncio.create_task(stream_of(source, 15)({**SCOPE}, client.receive, client.send))
    await source.waiting.wait()
    await clock.advance(14)
    assert client.bodies == []
    await clock.advance(2)
    await clock.advance(15)
    assert client.bodies == [PING, PING]
    assert [message.get("more_body") for message in client.messages] == [None, True, True]
    source.end()
    await response
    assert client.bodies[-1].endswith(DONE)


async def test_a_stream_that_flows_gets_no_ping(client, monkeypatch):
    clock = ManualClock(monkeypatch)
    source = ManualSource()
    response = asyncio.create_task(stream_of(source, 15)({**SCOPE}, client.receive, client.send))
    for text in "abcdef":
        source.queue.put_nowait(text)
        await clock.advance(10)
    assert PING not in client.bodies
    await clock.advance(16)
    await clock.advance(16)
    assert client.bodies[-1] == PING
    source.end()
    await response


async def test_without_an_interval_there_is_no_ping(client, monkeypatch):
    clock = ManualClock(monkeypatch)
    source = ManualSource()
    response = asyncio.create_task(stream_of(source, 0)({**SCOPE}, client.receive, client.send))
    await source.waiting.wait()
    await clock.advance(100_000)
    assert client.bodies == []
    source.end()
    await response


async def test_a_watch_over_a_client_who_stays_changes_nothing(client):
    async with ClientWatch(client.receive) as watch:
        await rounds()
    assert not watch.gone
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_the_body_of_a_left_watch_is_cut_where_it_waits(client):
    async with ClientWatch(client.receive) as watch:
        client.gone.set()
        await asyncio.Event().wait()
    assert watch.gone
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await rounds()


async def test_an_error_of_the_body_goes_on_though_the_client_has_left_as_well(client):
    async def body() -> None:
        async with ClientWatch(client.receive):
            client.gone.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise ValueError("of ours")

    with pytest.raises(ValueError, match="of ours"):
        await body()


async def test_what_a_client_sends_besides_is_no_departure(client):
    rest = asyncio.Queue()
    rest.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    source = ManualSource("a")
    response = asyncio.create_task(stream_of(source)({**SCOPE}, rest.get, client.send))
    await source.waiting.wait()
    await rounds()
    assert rest.empty()
    source.end()
    await response
    assert client.bodies[-1].endswith(DONE)


async def test_nobody_watches_a_client_any_longer_than_the_block(client):
    async with ClientWatch(client.receive):
        await rounds()
    await rounds()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_body_takes_the_way_past_the_layers_and_the_start_does_not(client):
    direct, source = Client(), ManualSource("a")
    source.end()
    await stream_of(source)({**SCOPE, "call": Call(send_body=direct.send)}, client.receive, client.send)
    assert [message["type"] for message in client.messages] == ["http.response.start"]
    assert [message["body"] for message in direct.messages] == [b"data: A\n\n", b"data: usage\n\n" + DONE]


async def test_what_the_connection_can_write_at_once_is_not_sent(client):
    source, written = ManualSource("a", "b", "c"), []
    source.end()

    def write(body: bytes) -> bool:
        if b"B" in body:
            return False
        written.append(body)
        return True

    await stream_of(source)({**SCOPE, "call": Call(writer=lambda: write)}, client.receive, client.send)
    assert written == [b"data: A\n\n", b"data: C\n\n"]
    assert client.bodies == [b"data: B\n\n", b"data: usage\n\n" + DONE]
