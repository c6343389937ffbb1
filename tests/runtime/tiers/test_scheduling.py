"""Tiers under a real scheduler and a device whose memory is a dict: whatever a sequence reuses holds what its name says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Several
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.api import FinishReason, Request, SamplingParams
from runtime.batch import ScheduledBatch
from runtime.fault import Fault
from runtime.kv.block_pool import BlockPool
from runtime.kv.kinds import AttentionKVSpec, Full, Window
from runtime.kv.layout import LayerGroup
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from runtime.tiers.host import HostTier
from runtime.tiers.scheduling import TierScheduling
from tests.invariants import check_pool, check_tables

BLOCK_SIZE, SAMPLED = 4, 7
KV = AttentionKVSpec(1, 1)
GROUPS = {"full": (LayerGroup(Full(KV)),), "window": (LayerGroup(Full(KV), 2), LayerGroup(Window(KV, 9)))}
UNFINISHED = object()  # a block that is being written


class Device:
    """The runner and the door. A copy reads or writes at its begin and at its end; between, blocks to be written hold nothing."""

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}
        self.slots: dict[int, object] = {}
        self.copies: list[tuple[Several[int], list[int], bool, list[object], asyncio.Future[None]]] = []
        self.runner = self

    def move_blocks(self, block_ids: Several[int], pages: Any, *, to_host: bool) -> asyncio.Future[None]:
        slots = pages()
        assert len(set(slots)) == len(slots) == len(block_ids)
        done = asyncio.get_running_loop().create_future()
        before = [
            self.blocks[block_id] if to_host else self.slots[slot]
            for block_id, slot in zip(block_ids, slots, strict=True)
        ]
        for block_id, slot in zip(block_ids, slots, strict=True):
            if to_host:
                self.slots[slot] = UNFINISHED
            else:
                self.blocks[block_id] = UNFINISHED
        self.copies.append((block_ids, slots, to_host, before, done))
        return done

    def end_copy(self, index: int, *, fails: bool) -> None:
        block_ids, slots, to_host, before, done = self.copies.pop(index)
        source, target = (self.blocks, self.slots) if to_host else (self.slots, self.blocks)
        ends = (block_ids, slots) if to_host else (slots, block_ids)
        for come, go, content in zip(*ends, before, strict=True):
            assert source[come] is content, "it was written while it was read"
            assert target[go] is UNFINISHED, "it was written twice at a time"
            target[go] = content
        if fails:
            done.set_exception(RuntimeError("a copy failed"))
        else:
            done.set_result(None)

    def fault(self, error: BaseException) -> Fault:
        return Fault.STEP

    def wake(self) -> None:
        pass


class Slots:
    slot_bytes = 1

    def rows(self, slots: list[int]) -> list[int]:
        return slots


class Run:
    def __init__(self, groups: tuple[LayerGroup, ...], num_blocks: int, num_slots: int) -> None:
        self.tiers = TierScheduling(HostTier(num_slots), Slots(), 3600.0, clock=lambda: 0.0)  # type: ignore[arg-type]
        limits = SchedulerLimits(3, 16, frozenset())
        cache = PrefixCache(BLOCK_SIZE, groups=groups)
        self.scheduler = Scheduler(limits, BlockPool(num_blocks), cache, POLICIES["fcfs"](), features=[self.tiers])
        self.device = Device()
        self.in_flight: list[tuple[ScheduledBatch, list[tuple[int, object]], list[tuple[int, object]]]] = []
        self.num_sequences = 0

    def add(self, prompt: list[int], num_tokens: int) -> None:
        self.num_sequences += 1
        request = Request(str(self.num_sequences), prompt, SamplingParams(num_tokens, temperature=0.0))
        self.scheduler.add(Sequence(request, number=self.num_sequences, max_model_len=64, seed=0))

    def launch(self) -> None:
        batch = self.scheduler.schedule()
        check_pool(self.scheduler)
        check_tables(self.scheduler)
        if batch is None:
            return
        reads, writes = [], []
        for row in batch.rows:
            sequence = self.scheduler.sequences.find(row.number)
            assert sequence is not None
            names = self.scheduler.blocks.cache.hash_blocks([*sequence.prompt_ids, *[SAMPLED] * 40])
            for table in sequence.tables:
                for place, block_id in enumerate(table.ids):
                    entry = table.first_entry + place // table.group.width
                    name = table.group, names[entry]
                    seen = table.group.first_in_window(row.start) // BLOCK_SIZE
                    if seen <= entry < row.start // BLOCK_SIZE:
                        reads.append((block_id, name))
                    elif row.start // BLOCK_SIZE <= entry <= (row.end - 1) // BLOCK_SIZE:
                        is_full = row.end >= (entry + 1) * BLOCK_SIZE
                        writes.append((block_id, name if is_full else object()))
        self.in_flight.append((batch, reads, writes))
        self.tiers.launches(batch, self.device)  # type: ignore[arg-type]

    def settle(self, *, fails: bool) -> None:
        batch, reads, writes = self.in_flight.pop(0)
        if fails:
            behind = [each for each, _, _ in self.in_flight]
            self.in_flight.clear()
            self.scheduler.forget_step([batch, *behind])
            return
        for block_id, content in writes:
            self.device.blocks[block_id] = content
        for block_id, name in reads:
            assert self.device.blocks[block_id] == name, "a sequence reads what is not its prefix"
        self.scheduler.settle(batch, [[SAMPLED] for _ in batch.sampling_rows])


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 30), st.integers(1, 9)),
    st.tuples(st.just("launch")),
    st.tuples(st.just("settle"), st.integers(0, 19)),
    st.tuples(st.just("copy"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("preempt")),
    st.tuples(st.just("finish"), st.integers(0, 9)),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*GROUPS]), st.integers(36, 60), st.integers(4, 60), st.lists(ACTIONS, max_size=80))
def test_no_block_is_lost_and_none_is_read_while_it_is_written(groups, num_blocks, num_slots, actions):
    asyncio.run(_play(Run(GROUPS[groups], num_blocks, num_slots), actions))


async def _play(run: Run, actions: list[Any]) -> None:
    device, scheduler = run.device, run.scheduler
    for action, *numbers in actions:
        if action == "add":
            text, length, num_tokens = numbers
            run.add([(token * (text + 3)) % 11 for token in range(length)], num_tokens)
        elif action == "launch" and len(run.in_flight) < 3:
            run.launch()
        elif action == "settle" and run.in_flight:
            run.settle(fails=numbers[0] == 0)
        elif action == "copy" and device.copies:
            device.end_copy(numbers[0] % len(device.copies), fails=numbers[1] == 0)
        elif action == "preempt" and scheduler.running:
            scheduler.sequences.preempt(scheduler.running[-1])
        elif action == "finish" and (all_of := [*scheduler.running, *scheduler.waiting]):
            scheduler.finish(all_of[numbers[0] % len(all_of)], FinishReason.ABORT)
        await asyncio.sleep(0)  # what ended is noted
        check_pool(scheduler)
    for _ in range(2000):  # everything ends
        if not (scheduler.running or scheduler.waiting or run.in_flight or device.copies):
            break
        run.launch()
        if run.in_flight:
            run.settle(fails=False)
        if device.copies:
            device.end_copy(0, fails=False)
        await asyncio.sleep(0)
    assert not scheduler.running
    assert not scheduler.waiting
    check_pool(scheduler)
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks
    host = run.tiers.host
    assert host.num_used == sum(len(slots) for slots in host._entries.values())
    assert not host._holds
