"""Chaos: engine, scheduler and streams under whatever may happen to them, in any order: requests, readers that leave or do not
read, pictures whose encoders are late or fail, matchers that fail or end an answer, drafts right and wrong, steps that fail,
memory that is short, a drain. Whatever happened, nobody waits for ever, nobody else's tokens change, and all is given back."""

from __future__ import annotations

import asyncio
import itertools
import logging
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.api import ConstraintError, EngineStopped, FinishReason, MediaItem, QueueFull, Request, SamplingParams
from runtime.encode.scheduling import EncoderLimits, EncoderScheduling
from runtime.engine.admission import AdmissionLimits
from runtime.engine.token_stream import EngineTokenStream
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import DeviceSpeculation, Speculation
from tests.fake_runner import Rule, make_engine, model_info
from tests.faulty_runner import Fail, FaultyRunner, Lost
from tests.features import feature_of, has_feature
from tests.invariants import check_pool, check_tables

NUM_BLOCKS, NUM_ROWS, BUDGET = 20, 4, 16  # so few that sequences of 40 tokens preempt each other
DRAIN_S = 3600.0  # which never pass


class Constraint(Enum):
    """What a matcher does when so many tokens have been drawn: nothing, or what ends its sequence."""

    KEEPS = auto()
    ENDS = auto()
    FAILS = auto()
    CANNOT = auto()


class Held(Rule):
    """A matcher that allows the token of its place only, which is what a FakeRunner samples; until it has seen `num` tokens."""

    def __init__(self, start: int, does: Constraint, num: int) -> None:
        super().__init__(lambda ids: {start + len(ids)})
        self._does, self._num = does, num

    def allowed(self) -> bytes | None:
        if len(self.ids) < self._num or self._does is Constraint.KEEPS:
            return super().allowed()
        if self._does is Constraint.FAILS:
            raise RuntimeError("a bug")
        if self._does is Constraint.CANNOT:
            raise ConstraintError("it cannot be kept")
        return bytes(128)  # nothing to add


class AtOnce(Executor):
    """Runs things where they are submitted, so that a run can be repeated."""

    def submit(self, work, /, *args, **more):
        done: Future = Future()
        done.set_result(work(*args, **more))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class Guesses:
    """A proposer whose guesses are right up to every seventh place."""

    def propose(self, sequence, most: int) -> list[int]:
        places = range(sequence.num_known_tokens, sequence.num_known_tokens + min(most, 3))
        return [place if place % 7 else 990 for place in places]

    def finished(self, sequence) -> None:
        pass


class WorthWhile(DeviceSpeculation):
    """Drafts of the device wherever there may be some; sequences that lack tokens are computed anew soon."""

    def __init__(self) -> None:
        super().__init__(Guesses(), 3)

    def gain(self, num_rows: int) -> float:
        return 1.0

    def steps_to_compute(self, num_tokens: int) -> float:
        return num_tokens / 20


@dataclass(eq=False)
class Client:
    """One `submit` and its reader."""

    requests: list[Request]
    stream: EngineTokenStream
    may_read: asyncio.Event
    reader: asyncio.Task[None] | None = None
    ids: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    constraints: list[tuple[Constraint, int] | None] = field(default_factory=list)
    has_left: bool = False
    was_aborted: bool = False

    async def read(self) -> None:
        async with self.stream:
            await self.may_read.wait()
            async for outputs in self.stream:
                for output in outputs:
                    assert output.index not in self.finish, "it ended twice"
                    self.ids.setdefault(output.index, []).extend(output.token_ids)
                    if output.finish is not None:
                        self.finish[output.index] = output.finish


class Chaos(RuleBasedStateMachine):
    @initialize(
        policy=some.sampled_from(["fcfs", "priority", "fair"]),
        steps_in_flight=some.sampled_from([1, 2]),
        drafts=some.sampled_from([None, "host", "device"]),
    )
    def begin(self, policy: str, steps_in_flight: int, *, drafts: str | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.runner = FaultyRunner(manual=True)
        self.clients: list[Client] = []
        self.probes: list[asyncio.Task[None]] = []
        self.num_admitted = 0
        self.draining: asyncio.Task[int] | None = None
        speculations = {None: None, "host": Speculation(Guesses(), 3), "device": WorthWhile()}
        self.engine = self.run(self.make(policy, steps_in_flight, speculations[drafts]))
        self.engine._mask_maker._threads = AtOnce()
        self.scheduler = self.engine._scheduler
        if drafts is not None:
            steps = itertools.count(1)
            resting = feature_of(self.scheduler, DraftScheduling).resting
            resting.follows_size = lambda num_rows: next(steps) % 5 != 0  # it rests now and then

    async def make(self, policy: str, steps_in_flight: int, speculation: Speculation | None):
        self.runner.launched = asyncio.Event()
        options = {
            "num_blocks": NUM_BLOCKS,
            "max_num_seqs": NUM_ROWS,
            "budget": BUDGET,
            "policy": policy,
            "speculation": speculation,
        }
        model = model_info(modalities=frozenset({"image"}))
        self.encoding = EncoderScheduling(EncoderLimits(6, 10, 64))
        return make_engine(
            self.runner, **options, model=model, steps_in_flight=steps_in_flight,
            admission=AdmissionLimits(max_queue=6), encoding=self.encoding,
        )  # fmt: skip

    def run(self, work):
        return self.loop.run_until_complete(work)

    # --- what clients do ------------------------------------------------------------------------------------------

    @rule(
        lengths=some.lists(some.integers(1, 30), min_size=1, max_size=3),
        max_tokens=some.integers(0, 12),
        shares=some.booleans(),
        reads=some.booleans(),
        priority=some.integers(-1, 1),
        constraint=some.none() | some.tuples(some.sampled_from(Constraint), some.integers(0, 8)),
        pictures=some.lists(some.integers(1, 5), max_size=2),
    )
    def submit(
        self, lengths: list[int], max_tokens: int, *, shares: bool, reads: bool, priority: int,
        constraint: tuple[Constraint, int] | None, pictures: list[int],
    ) -> None:  # fmt: skip
        async def admit() -> None:
            first = len(self.clients)
            requests = [
                Request(
                    f"{first}-{index}",
                    [7] * length if shares else [(first * 31 + index) % 900] * length,
                    SamplingParams(
                        max_tokens, matchers=() if constraint is None else (partial(Held, length, *constraint),)
                    ),
                    priority=priority,
                    media=self.placed(pictures, length, first if not shares else 0),
                )
                for index, length in enumerate(lengths)
            ]
            try:
                stream = self.engine.submit(requests)
            except (QueueFull, EngineStopped):
                return
            self.num_admitted += len(requests)
            client = Client(requests, stream, asyncio.Event(), constraints=[constraint] * len(requests))
            if reads:
                client.may_read.set()
            client.reader = asyncio.create_task(client.read())
            self.clients.append(client)
            await asyncio.sleep(0)

        self.run(admit())

    def placed(self, sizes: list[int], length: int, name: int) -> tuple[MediaItem, ...]:
        """Pictures of so many outputs, one behind the other with a token between them, as far as a prompt has room for them."""
        found, start = [], 1
        for number, size in enumerate(sizes):
            if start + size <= length:
                positions = np.arange(start, start + size, dtype=np.int32)
                found.append(MediaItem("image", b"%d %d %d" % (name % 3, number, size), positions, {}))
                start += size + 1
        return tuple(found)

    @precondition(lambda self: self.clients)
    @rule(data=some.data())
    def leave(self, data) -> None:
        client = data.draw(some.sampled_from(self.clients))
        client.has_left = True
        client.reader.cancel()
        self.run(asyncio.wait({client.reader}))

    @precondition(lambda self: self.clients)
    @rule(data=some.data())
    def stop(self, data) -> None:
        client = data.draw(some.sampled_from(self.clients))
        index = data.draw(some.integers(0, len(client.requests) - 1))
        if index not in client.finish:
            client.stopped.add(index)

        async def found_a_stop_string() -> None:
            client.stream.stop(index)

        self.run(found_a_stop_string())

    @rule()
    def everybody_reads(self) -> None:
        for client in self.clients:
            client.may_read.set()
        self.turn()

    @rule()
    def probe(self) -> None:
        async def begin() -> None:
            self.probes.append(asyncio.create_task(self.engine.probe()))
            await asyncio.sleep(0)

        self.run(begin())

    @precondition(lambda self: len(self.clients) > 4 and self.draining is None)
    @rule(waits=some.booleans())
    def drain(self, *, waits: bool) -> None:
        async def begin() -> None:
            self.draining = asyncio.create_task(self.engine.drain(DRAIN_S if waits else 0.0))
            await asyncio.sleep(0)
            if not waits:
                await self.draining
                for client in self.clients:
                    client.was_aborted = True

        self.run(begin())

    # --- what the device does -------------------------------------------------------------------------------------

    @rule(num_steps=some.integers(1, 6))
    def complete(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.runner.complete_step()
            self.turn()

    @rule(fails=some.booleans())
    def encode(self, *, fails: bool) -> None:
        self.runner.complete_encoder(fails=fails)
        self.turn()

    @rule(error=some.sampled_from([RuntimeError, MemoryError]))
    def fail_on_the_device(self, error: type[Exception]) -> None:
        self.runner.fail_step(error())
        self.turn()

    @rule(how=some.lists(some.sampled_from([None, Fail.LAUNCH, Fail.MEMORY, Fail.BIND, Fail.NUMBERS]), max_size=4))
    def fail_to_launch(self, how: list[Fail | None]) -> None:
        self.runner.next.extend(how)
        self.turn()

    @rule()
    def turn(self) -> None:
        async def some_turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.run(some_turns())

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            check_pool(self.scheduler)
            check_tables(self.scheduler, drafting=has_feature(self.scheduler, DraftScheduling))

    # --- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.run(self.end())
            self.check()
        finally:
            self.loop.close()

    async def end(self) -> None:
        """The device works again, everybody reads, and nobody is left waiting."""
        self.runner.next.clear()
        for client in self.clients:
            client.may_read.set()
        readers = {client.reader for client in self.clients}
        waiting = readers | set(self.probes) | ({self.draining} if self.draining is not None else set())
        for _ in range(5000):
            if all(task.done() for task in waiting):
                break
            self.runner.complete_step()
            self.runner.complete_encoder()
            await asyncio.sleep(0)
        assert all(task.done() for task in waiting), "somebody waits for ever"
        self.runner.manual = False
        while self.runner.complete_step():  # noqa: ASYNC110 (the steps are completed here)
            await asyncio.sleep(0)
        assert await self.engine.drain(60) == 0
        assert await self.engine.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        for task in self.probes:
            task.exception()

    def check(self) -> None:
        for client in self.clients:
            if client.has_left:
                continue
            assert client.reader.exception() is None
            for index, request in enumerate(client.requests):
                self.check_one(client, index, request)
        check_pool(self.scheduler)
        assert self.scheduler.blocks.pool.num_free == NUM_BLOCKS
        assert sorted(self.scheduler.sequences.free_rows) == list(range(NUM_ROWS))
        assert not self.engine._requests.by_number
        assert not self.engine.loop.in_flight
        assert not self.encoding.cache._holders
        assert self.encoding.cache.num_used <= 10
        (ended,) = (metric for metric in self.engine.metrics() if metric.name == "request_success")
        assert sum(ended.samples[("finished_reason", reason.value),] for reason in FinishReason) == self.num_admitted

    def check_one(self, client: Client, index: int, request: Request) -> None:
        """Every token is the one of its place, and whoever was not to blame for anything has all of them."""
        start, most = len(request.prompt_ids), request.sampling.max_tokens
        ids, finish = client.ids.get(index, []), client.finish.get(index)
        assert ids == list(range(start, start + len(ids)))
        (number,) = (number for number, name in self.runner.names.items() if name == request.id)
        if index in client.stopped or (client.was_aborted and finish is FinishReason.ABORT):
            return
        does, num = client.constraints[index] or (Constraint.KEEPS, 0)
        endings = {
            Constraint.ENDS: FinishReason.STOP, Constraint.FAILS: FinishReason.ERROR, Constraint.CANNOT: FinishReason.INVALID,
        }  # fmt: skip
        if finish is FinishReason.LENGTH:
            assert len(ids) == most
            assert does is Constraint.KEEPS or most <= num
        elif finish is not FinishReason.ERROR or number not in self.runner.blamed:
            assert finish is endings.get(does)
            assert len(ids) == num


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


@pytest.fixture(autouse=True, scope="module")
def _no_tracebacks():
    """Keep thousands of tracebacks out of the log, of these tests only."""
    logger = logging.getLogger("oneloop.engine")
    logger.addFilter(_has_no_traceback)
    yield
    logger.removeFilter(_has_no_traceback)


TestChaos = Chaos.TestCase
TestChaos.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("after", range(8))
async def test_a_device_that_is_lost_at_any_moment_leaves_nobody_waiting_and_nothing_taken(after):
    runner = FaultyRunner(manual=True)
    engine = make_engine(runner, num_blocks=NUM_BLOCKS, max_num_seqs=NUM_ROWS, budget=BUDGET)
    clients = []
    for name in range(6):
        requests = [Request(f"{name}-{index}", [name] * (5 * index + 3), SamplingParams(10)) for index in range(2)]
        client = Client(requests, engine.submit(requests), asyncio.Event())
        client.may_read.set()
        client.reader = asyncio.create_task(client.read())
        clients.append(client)
    probe = asyncio.create_task(engine.probe())
    for _ in range(after):
        while not runner.complete_step():  # noqa: ASYNC110 (the steps are completed here)
            await asyncio.sleep(0)
    if after % 2:
        runner.next.append(Fail.LOST)
    while not engine.health().hopeless:
        if not after % 2 and runner.fail_step(Lost()):
            after = 1
        runner.complete_step()
        await asyncio.sleep(0)
    await asyncio.wait({client.reader for client in clients})
    for client in clients:
        assert set(client.finish.values()) <= {FinishReason.ERROR, FinishReason.LENGTH}
        assert len(client.finish) == 2
    await asyncio.wait({probe})
    probe.exception()
    assert await engine.drain(3600) == 0
    assert await engine.close(limit_s=60)
    assert engine._scheduler.blocks.pool.num_free == NUM_BLOCKS
    assert not engine._requests.by_number
