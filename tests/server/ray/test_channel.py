"""The connection by which answers come: pieces in order, each to its request, and what a line that breaks means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from server.http.errors import ReplicaLost
from server.ray.channel import Delivery, FrameKind, Lines, Mailbox, ReplyMailbox, ReplyTo
from server.ray.exchange import ACCEPTED, Piece, ResponseHead

HEAD = ResponseHead(200, [(b"content-type", b"text/event-stream")])


@pytest.fixture
async def mailbox() -> AsyncIterator[Mailbox]:
    made = Mailbox("127.0.0.1")
    yield made
    await made.close()


@pytest.fixture
async def lines() -> AsyncIterator[Lines]:
    made = Lines()
    yield made
    made.close()


async def test_pieces_come_to_their_request_in_order(mailbox, lines):
    first, second = await mailbox.open(), await mailbox.open()
    line = await lines.to(first.reply_to)
    assert line is await lines.to(second.reply_to)
    for box, text in ((first, b"a"), (second, b"b")):
        line.send(box.reply_to.number, ACCEPTED)
        line.send(box.reply_to.number, HEAD)
        line.send(box.reply_to.number, text * 100_000)
        line.end(box.reply_to.number)
    assert [piece async for piece in first] == [ACCEPTED, HEAD, b"a" * 100_000]
    assert [piece async for piece in second] == [ACCEPTED, HEAD, b"b" * 100_000]


def test_it_is_the_same_on_the_loop_that_serve_runs():
    async def exchange() -> list[Piece]:
        mailbox, lines = Mailbox("127.0.0.1"), Lines()
        box = await mailbox.open()
        line = await lines.to(box.reply_to)
        for piece in (ACCEPTED, HEAD, b"text"):
            line.send(box.reply_to.number, piece)
        line.end(box.reply_to.number)
        found = [piece async for piece in box]
        lines.close()
        await mailbox.close()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(exchange()) == [ACCEPTED, HEAD, b"text"]


async def test_what_comes_while_nobody_reads_is_one_piece():
    box = ReplyMailbox(ReplyTo("", 0, b"", 1), lambda number: None)
    for text in (b"a", b"b", b"c"):
        box.put(FrameKind.BODY, text)
    assert await anext(box) == b"abc"
    box.put(FrameKind.BODY, b"d")
    box.put(FrameKind.END, b"")
    assert [piece async for piece in box] == [b"d"]


async def test_what_has_come_is_read_before_a_line_that_broke_is_heard_of(mailbox, lines):
    box, other = await mailbox.open(), await mailbox.open()
    line = await lines.to(box.reply_to)
    line.send(box.reply_to.number, b"so far")
    line.close()
    assert await anext(box) == b"so far"
    with pytest.raises(ReplicaLost):
        await anext(box)
    another = await lines.to(other.reply_to)  # of the same replica, or its successor
    another.end(other.reply_to.number)
    assert [piece async for piece in other] == []


async def test_who_does_not_know_the_secret_is_not_heard(mailbox, lines):
    box = await mailbox.open()
    wrong = ReplyTo(box.reply_to.host, box.reply_to.port, b"?" * 32, box.reply_to.number)
    line = await lines.to(wrong)
    line.send(wrong.number, b"not from here")
    while not line.is_lost:  # noqa: ASYNC110 (the loop's next rounds)
        await asyncio.sleep(0)
    box.fail(TimeoutError("nothing came"))
    with pytest.raises(TimeoutError):
        await anext(box)


async def test_what_comes_for_a_request_that_is_over_is_dropped(mailbox, lines):
    over, goes_on = await mailbox.open(), await mailbox.open()
    line = await lines.to(over.reply_to)
    over.close()
    line.send(over.reply_to.number, b"too late")
    line.end(goes_on.reply_to.number)
    assert [piece async for piece in goes_on] == []


async def test_a_call_that_fails_ends_its_answer_with_our_error(mailbox):
    async def fails() -> None:
        raise KeyError("theirs")

    box = await mailbox.open()
    box.put(FrameKind.BODY, b"so far")
    async with Delivery(box, fails(), lambda: None, lambda error: ReplicaLost()) as stream:
        assert await anext(stream) == b"so far"
        with pytest.raises(ReplicaLost):
            await anext(stream)


async def test_leaving_in_the_midst_cancels_the_call_and_the_end_does_not(mailbox):
    cancelled = []

    over = asyncio.Event()

    async def works() -> None:
        await over.wait()

    box = await mailbox.open()
    with pytest.raises(ZeroDivisionError):
        async with Delivery(box, works(), lambda: cancelled.append(1)):
            raise ZeroDivisionError
    assert cancelled == [1]
    box = await mailbox.open()
    box.put(FrameKind.END, b"")
    async with Delivery(box, works(), lambda: cancelled.append(2)) as stream:
        assert [piece async for piece in stream] == []
    assert cancelled == [1]
    over.set()
    while asyncio.all_tasks() - {asyncio.current_task()}:  # noqa: ASYNC110 (both calls end)
        await asyncio.sleep(0)
