"""The stream between the engine and a reader: what wakes the reader, and with how much."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from runtime.api import FinishReason, Output
from runtime.engine import token_stream
from runtime.engine.token_stream import STREAMS_A_TURN, WRITERS_A_TURN, EngineTokenStream, StreamNotifier

Read = Callable[[EngineTokenStream], Awaitable[list[list[int]]]]


async def iterate(stream: EngineTokenStream) -> list[list[int]]:
    return [[len(output.token_ids) for output in outputs] async for outputs in stream]


async def be_handed(stream: EngineTokenStream) -> list[list[int]]:
    found: list[list[int]] = []
    await stream.hand_to(lambda outputs: found.append([len(output.token_ids) for output in outputs]))
    return found


@pytest.fixture(params=[iterate, be_handed])
def read(request: pytest.FixtureRequest) -> Read:
    """Numbers of tokens of each Output that a reader gets."""
    return request.param


async def reads(
    read: Read, num_requests: int, interval: int, steps: Sequence[Sequence[int]], last: int
) -> list[list[int]]:
    """What `read` gives, which waits whenever it can. `steps`: the requests that get a token in each; all end with `last` tokens
    more."""
    stream = EngineTokenStream(num_requests, lambda index, reason: None, interval)
    reader = asyncio.create_task(read(stream))
    for step in steps:
        await asyncio.sleep(0)
        for index in step:
            stream.put(Output(index, [7]))
    await asyncio.sleep(0)
    for index in range(num_requests):
        stream.put(Output(index, [9] * last, FinishReason.LENGTH))
    return await reader


@pytest.mark.parametrize(
    ("interval", "found"),
    [(1, [[1]] * 9), (2, [[1], [2], [2], [2], [2]]), (3, [[1], [3], [3], [2]]), (100, [[1], [8]])],
)
async def test_the_first_token_the_end_and_every_interval_wake_the_reader(read, interval, found):
    assert await reads(read, 1, interval, [[0]] * 8, last=1) == found


async def test_each_request_of_a_stream_has_its_own_first_token_and_count(read):
    found = await reads(read, 2, 3, [[0], [1], [0], [1, 0], [0], [1]], last=0)
    assert found == [[1], [1], [3, 1], [1, 0]]


async def test_it_counts_how_long_outputs_wait_for_their_reader_and_says_when_that_is_done_with_a_request():
    now_s, delivered = 10.0, []
    stream = EngineTokenStream(2, lambda index, reason: None, 1, delivered.append, lambda: now_s)
    stream.put(Output(0, [1]))
    now_s = 12.0
    stream.put(Output(1, [1], FinishReason.STOP))  # the first has waited longest
    now_s = 13.0
    await anext(stream)
    assert (stream.held_s, delivered) == (3.0, []), "it is still at work on them"
    now_s = 20.0
    stream.put(Output(0, [2], FinishReason.LENGTH))
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
        stream.put(Output(0, [1], FinishReason.STOP))
    assert sorted(delivered) == [0, 1]


# --- handed over --------------------------------------------------------------------------------------------------


async def test_what_comes_while_a_reader_is_busy_is_handed_over_as_one():
    stream, found, busy = EngineTokenStream(1, lambda index, reason: None), [], asyncio.Event()

    def take(outputs):
        found.append(outputs[0].token_ids)
        return busy.wait if len(found) == 1 else None

    reader = asyncio.create_task(stream.hand_to(take))
    await asyncio.sleep(0)
    for token_id in range(4):
        stream.put(Output(0, [token_id]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert found == [[0]]
    busy.set()
    stream.put(Output(0, [4], FinishReason.LENGTH))
    await reader
    assert found == [[0], [1, 2, 3, 4]]


async def test_an_error_of_the_reader_is_raised_to_it_and_what_it_left_is_ended():
    ended, others = [], []
    notifier = StreamNotifier()
    stream = EngineTokenStream(1, lambda index, reason: ended.append(reason), notifier=notifier)
    other = EngineTokenStream(1, lambda index, reason: None, notifier=notifier)

    async def read() -> None:
        async with stream:
            await stream.hand_to(lambda outputs: 1 // 0)

    readers = [asyncio.create_task(read()), asyncio.create_task(other.hand_to(others.append))]
    await asyncio.sleep(0)
    stream.put(Output(0, [1]))
    other.put(Output(0, [1], FinishReason.STOP))
    with pytest.raises(ZeroDivisionError):
        await readers[0]
    await readers[1]
    assert ended == [FinishReason.ABORT]
    assert len(others) == 1


async def test_a_reader_that_stops_its_last_request_is_done():
    ended, delivered = [], []
    stream = EngineTokenStream(1, lambda index, reason: ended.append(reason), 1, delivered.append)
    reader = asyncio.create_task(stream.hand_to(lambda outputs: stream.stop(0)))
    await asyncio.sleep(0)
    stream.put(Output(0, [1]))
    await reader
    assert (ended, delivered) == ([FinishReason.STOP], [0])


async def test_a_reader_that_left_is_handed_nothing():
    stream, found = EngineTokenStream(1, lambda index, reason: None), []
    reader = asyncio.create_task(stream.hand_to(found.append))
    await asyncio.sleep(0)
    stream.put(Output(0, [1]))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.put(Output(0, [2], FinishReason.STOP))
    await asyncio.sleep(0)
    assert found == []


async def test_others_have_their_turn_between_the_streams_of_a_large_step():
    notifier, order = StreamNotifier(), []
    streams = [
        EngineTokenStream(1, lambda index, reason: None, notifier=notifier) for _ in range(2 * STREAMS_A_TURN + 1)
    ]
    readers = [
        asyncio.create_task(stream.hand_to(lambda outputs, number=number: order.append(number)))
        for number, stream in enumerate(streams)
    ]
    await asyncio.sleep(0)
    for stream in streams:
        stream.put(Output(0, [1], FinishReason.STOP))
    for _ in range(3):
        order.append("others")
        await asyncio.sleep(0)
    await asyncio.gather(*readers)
    assert [place for place, entry in enumerate(order) if entry == "others"] == [
        0, 1 + STREAMS_A_TURN, 2 + 2 * STREAMS_A_TURN,
    ]  # fmt: skip
    assert [entry for entry in order if entry != "others"] == [*range(len(streams))]


# --- written without an Output ------------------------------------------------------------------------------------


class Writer:
    """Writes (request, ids) to `told`. `free`: takes any."""

    def __init__(self, told: list, index: int) -> None:
        self.told, self.index = told, index
        self.is_open = self.free = True
        self.error: Exception | None = None

    @staticmethod
    def write_all(work):
        failed = []
        for each in work:
            writer, ids, *_ = each
            if writer.error is not None:
                failed.append((each, writer.error))
            elif writer.is_open and writer.free:
                writer.told.append((writer.index, ids))
            else:
                writer.is_open = False
                failed.append((each, None))
        return failed


class Written:
    """A reader of `stream` whose requests have writers: `told` is what these and it are given, in order."""

    def __init__(self, stream: EngineTokenStream) -> None:
        self.stream, self.told = stream, []
        self.writers: dict[int, Writer] = {}
        self.rest: Callable[[], Awaitable[None]] | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self.stream:
            await self.stream.hand_to(self._take, self._writer_of)

    def _take(self, outputs):
        self.told += [("taken", output.index, output.token_ids) for output in outputs]
        return self.rest

    def _writer_of(self, index: int) -> Writer:
        assert index not in self.writers
        self.writers[index] = Writer(self.told, index)
        return self.writers[index]


async def settle(stream: EngineTokenStream, index: int, *ids: int, finish: FinishReason | None = None) -> None:
    """As the engine does, and the loop's turn behind it."""
    if finish is not None or not stream.put_ids(index, [*ids]):
        stream.put(Output(index, [*ids], finish))
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def one_written() -> tuple[EngineTokenStream, Written]:
    """A stream of one request whose first id, 0, its reader has: the next goes to a writer."""
    stream = EngineTokenStream(1, lambda index, reason: None)
    reader = Written(stream)
    await asyncio.sleep(0)
    await settle(stream, 0, 0)
    return stream, reader


async def test_ids_behind_the_first_output_of_a_request_go_to_its_writer_and_the_last_does_not():
    ended = []
    stream = EngineTokenStream(2, lambda index, reason: ended.append((index, reason)))
    reader = Written(stream)
    await asyncio.sleep(0)
    for id in range(3):
        await settle(stream, 0, id)
    await settle(stream, 1, 7)
    await settle(stream, 1, 8, 9)
    await settle(stream, 0, 3, finish=FinishReason.LENGTH)
    await settle(stream, 1, 4, finish=FinishReason.STOP)
    await reader.task
    assert reader.told == [
        ("taken", 0, [0]), (0, [1]), (0, [2]), ("taken", 1, [7]), (1, [8, 9]), ("taken", 0, [3]), ("taken", 1, [4]),
    ]  # fmt: skip
    assert not any(writer.is_open for writer in reader.writers.values())
    assert not ended


async def test_what_a_writer_does_not_take_is_handed_over_in_order_and_then_it_goes_on():
    stream, reader = await one_written()
    reader.writers[0].free = False
    assert stream.put_ids(0, [1])
    assert stream.put_ids(0, [2])  # of another step, before the loop's turn
    await asyncio.sleep(0)
    reader.writers[0].free = True
    await settle(stream, 0, 3)
    await settle(stream, 0, 4)
    assert reader.told == [("taken", 0, [0]), ("taken", 0, [1, 2]), (0, [3]), (0, [4])]
    await settle(stream, 0, 5, finish=FinishReason.LENGTH)
    await reader.task


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, None])
@pytest.mark.parametrize("a_turn", [256, 1])
async def test_what_a_writer_does_not_take_comes_before_what_waits_already(finish, a_turn, monkeypatch):
    """The engine settles a step more while the loop is behind with writers, and that one brings an end, or log-probabilities."""
    monkeypatch.setattr(token_stream, "WRITERS_A_TURN", a_turn)
    stream, reader = await one_written()
    reader.writers[0].free = False
    assert stream.put_ids(0, [1])
    assert stream.put_ids(0, [2, 3])
    stream.put(Output(0, [4], finish))
    for _ in range(4):
        await asyncio.sleep(0)
    reader.writers[0].free = True
    if finish is None:
        assert reader.told == [("taken", 0, [0]), ("taken", 0, [1, 2, 3, 4])]
        await settle(stream, 0, 5, finish=FinishReason.LENGTH)
    await reader.task
    assert [id for *_, ids in reader.told for id in ids] == [*range(5 if finish else 6)]


async def test_nothing_is_written_beside_a_reader_that_is_busy():
    stream, busy = EngineTokenStream(1, lambda index, reason: None), asyncio.Event()
    reader = Written(stream)
    await asyncio.sleep(0)
    await settle(stream, 0, 0)
    reader.writers[0].free, reader.rest = False, busy.wait
    for id in range(1, 4):
        await settle(stream, 0, id)
    reader.rest, reader.writers[0].free = None, True
    assert reader.told == [("taken", 0, [0]), ("taken", 0, [1])]
    busy.set()
    await asyncio.sleep(0)
    await settle(stream, 0, 4)
    await settle(stream, 0, 5)
    await settle(stream, 0, 6, finish=FinishReason.LENGTH)
    await reader.task
    ids = [id for *_, ids in reader.told for id in ids]
    assert ids == [*range(7)]
    assert (0, [5]) in reader.told, "it goes on"


async def test_the_end_comes_behind_what_is_still_to_be_written():
    stream, reader = await one_written()
    assert stream.put_ids(0, [1])
    stream.put(Output(0, [2], FinishReason.LENGTH))
    await reader.task
    assert reader.told == [("taken", 0, [0]), (0, [1]), ("taken", 0, [2])]


@pytest.mark.parametrize("leaves", [True, False])
async def test_nothing_is_written_once_a_reader_has_left_or_stopped_a_request(leaves):
    stream, reader = await one_written()
    if leaves:
        reader.task.cancel()
        assert stream.put_ids(0, [1]), "which it does not know yet"
    else:
        assert stream.put_ids(0, [1])
        stream.stop(0)
    await asyncio.sleep(0)
    await asyncio.wait([reader.task])
    assert not stream.put_ids(0, [2])
    assert reader.told == [("taken", 0, [0])]


async def test_what_a_writer_raises_is_raised_to_its_reader_and_the_others_are_written():
    notifier, ended = StreamNotifier(), []
    streams = [EngineTokenStream(1, lambda index, reason: ended.append(reason), notifier=notifier) for _ in range(2)]
    readers = [Written(stream) for stream in streams]
    await asyncio.sleep(0)
    for stream in streams:
        await settle(stream, 0, 0)
    readers[0].writers[0].error = ZeroDivisionError()
    for stream in streams:
        assert stream.put_ids(0, [1])
    with pytest.raises(ZeroDivisionError):
        await readers[0].task
    assert ended == [FinishReason.ABORT]
    await settle(streams[1], 0, 2, finish=FinishReason.LENGTH)
    await readers[1].task
    assert readers[1].told == [("taken", 0, [0]), (0, [1]), ("taken", 0, [2])]


async def test_of_many_that_are_written_others_have_their_turn_between_some():
    notifier, told = StreamNotifier(), []
    streams = [EngineTokenStream(1, lambda index, reason: None, notifier=notifier) for _ in range(WRITERS_A_TURN + 1)]
    readers = [Written(stream) for stream in streams]
    await asyncio.sleep(0)
    for stream in streams:
        stream.put(Output(0, [0]))
    for _ in range(1 + WRITERS_A_TURN // STREAMS_A_TURN):
        await asyncio.sleep(0)
    for reader in readers:
        reader.writers[0].told = told
        assert reader.stream.put_ids(0, [1])
    counts = []
    for _ in range(2):
        await asyncio.sleep(0)
        counts.append(len(told))
    assert counts == [WRITERS_A_TURN, WRITERS_A_TURN + 1]
    for reader in readers:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)


async def test_where_several_tokens_are_wanted_at_once_nothing_is_written():
    stream = EngineTokenStream(1, lambda index, reason: None, interval=2)
    reader = Written(stream)
    await asyncio.sleep(0)
    await settle(stream, 0, 0)
    assert not stream.put_ids(0, [1])
    await settle(stream, 0, 1, finish=FinishReason.LENGTH)
    await reader.task
