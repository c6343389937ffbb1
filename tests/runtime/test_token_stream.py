"""The stream between the engine and a reader: what wakes the reader, and with how much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from runtime.api import FinishReason
from runtime.token_stream import EngineTokenStream


async def reads(num_requests: int, interval: int, steps: Sequence[Sequence[int]], last: int) -> list[list[int]]:
    """Numbers of tokens of each Output that a reader gets, which waits whenever it can. `steps`: the requests that get a token in
    each; all end with `last` tokens more."""
    stream = EngineTokenStream(num_requests, lambda index, reason: None, interval)

    async def read() -> list[list[int]]:
        return [[len(output.token_ids) for output in outputs] async for outputs in stream]

    reader = asyncio.create_task(read())
    for step in steps:
        await asyncio.sleep(0)
        for index in step:
            stream.put(index, [7], 0)
    await asyncio.sleep(0)
    for index in range(num_requests):
        stream.put(index, [9] * last, 0, FinishReason.LENGTH)
    return await reader


@pytest.mark.parametrize(
    ("interval", "found"),
    [(1, [[1]] * 9), (2, [[1], [2], [2], [2], [2]]), (3, [[1], [3], [3], [2]]), (100, [[1], [8]])],
)
async def test_the_first_token_the_end_and_every_interval_wake_the_reader(interval, found):
    assert await reads(1, interval, [[0]] * 8, last=1) == found


async def test_each_request_of_a_stream_has_its_own_first_token_and_count():
    found = await reads(2, 3, [[0], [1], [0], [1, 0], [0], [1]], last=0)
    assert found == [[1], [1], [3, 1], [1, 0]]


async def test_it_counts_how_long_outputs_wait_for_their_reader_and_says_when_that_is_done_with_a_request():
    now_s, delivered = 10.0, []
    stream = EngineTokenStream(2, lambda index, reason: None, 1, delivered.append, lambda: now_s)
    stream.put(0, [1], 0)
    now_s = 12.0
    stream.put(1, [1], 0, FinishReason.STOP)  # the first has waited longest
    now_s = 13.0
    await anext(stream)
    assert (stream.held_s, delivered) == (3.0, []), "it is still at work on them"
    now_s = 20.0
    stream.put(0, [2], 0, FinishReason.LENGTH)
    now_s = 20.5
    await anext(stream)
    assert (stream.held_s, delivered) == (3.5, [])
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert delivered == [1, 0]


async def test_a_reader_that_leaves_is_done_with_all():
    delivered = []
    stream = EngineTokenStream(2, lambda index, reason: None, 1, delivered.append)
    async with stream:
        stream.put(0, [1], 0, FinishReason.STOP)
    assert sorted(delivered) == [0, 1]
