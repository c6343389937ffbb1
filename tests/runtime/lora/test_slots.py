"""Slots: whose adapter is where, and whose turn it is for a place."""

from __future__ import annotations

import random
from bisect import insort

from hypothesis import given
from hypothesis import strategies as st

from runtime.api import Adapter, Request, SamplingParams
from runtime.batch import AdapterLoad
from runtime.config import LoraLimits
from runtime.lora.slots import AdapterSlots
from runtime.sequence import Sequence


class Bench:
    """Slots whose adapters are called 1, 2, 3 …; sequences are numbered as they come."""

    def __init__(self, num_adapters: int, max_loras: int, max_cpu_loras: int | None = None) -> None:
        self.loading: list[int] = []
        self.dropped: list[int] = []
        limits = LoraLimits(max_loras, max_cpu_loras or num_adapters, 8)
        self.slots = AdapterSlots(limits, self.loading.append, self.dropped.append)
        self.waiting: list[Sequence] = []
        for key in range(1, num_adapters + 1):
            self.slots.add(key, f"a{key}")
        self._number = 0

    def ask(self, key: int | None) -> Sequence:
        self._number += 1
        adapter = None if key is None else Adapter(f"a{key}", key)
        request = Request("r", [1], SamplingParams(4), adapter=adapter)
        sequence = Sequence(request, number=self._number, max_model_len=64, seed=0)
        if key is not None:
            self.slots.waits(key)
        self.waiting.append(sequence)
        return sequence

    def may_start(self) -> list[Sequence]:
        self.slots.turn(self.waiting, order)
        return [sequence for sequence in self.waiting if self.slots.may_start(sequence, order)]

    def start(self, sequence: Sequence) -> int:
        assert self.slots.may_start(sequence, order)
        self.waiting.remove(sequence)
        return -1 if sequence.request.adapter is None else self.slots.starts(sequence.request.adapter.key)

    def end(self, sequence: Sequence, *, ran: bool = True) -> None:
        assert sequence.request.adapter is not None
        if ran:
            self.slots.stops(sequence.request.adapter.key)
        self.slots.ends(sequence.request.adapter.key)


def order(sequence: Sequence) -> tuple[int, int]:
    return 0, sequence.number


def test_an_adapter_takes_a_slot_with_its_first_sequence_and_keeps_it():
    bench = Bench(2, max_loras=2)
    first, second, other = bench.ask(1), bench.ask(1), bench.ask(2)
    assert bench.may_start() == [first, second, other]
    assert bench.start(first) == bench.start(second) == 0
    assert bench.start(other) == 1
    assert bench.slots.take_loads() == (AdapterLoad(0, 1), AdapterLoad(1, 2))
    bench.end(first)
    bench.end(second)
    assert bench.start(bench.ask(1)) == 0
    assert bench.slots.take_loads() == ()


def test_a_step_has_no_more_adapters_than_there_are_slots_and_others_go_on():
    bench = Bench(3, max_loras=2)
    running = [bench.ask(key) for key in (1, 2)]
    for sequence in running:
        bench.start(sequence)
    blocked, plain, more = bench.ask(3), bench.ask(None), bench.ask(2)
    assert bench.may_start() == [plain, more]
    bench.end(running[0])
    assert blocked in bench.may_start()
    assert bench.start(blocked) == 0
    assert bench.slots.num_slot_evictions == 1


def test_whoever_waits_for_a_slot_is_not_overtaken_for_ever():
    """Adapters 1 and 2 are popular: the one that has its slot longest makes room, and the other goes on."""
    bench = Bench(4, max_loras=2)
    running = {key: bench.ask(key) for key in (1, 2)}
    for sequence in running.values():
        bench.start(sequence)
    early = bench.ask(1)
    third, fourth = bench.ask(3), bench.ask(4)
    late = {key: bench.ask(key) for key in (1, 2)}
    assert bench.may_start() == [early, late[2]]
    bench.start(early)
    bench.end(running[1])
    assert third not in bench.may_start()  # the early one still runs
    bench.end(early)
    assert bench.may_start()[0] is third
    bench.start(third)
    assert bench.may_start() == []  # now 2, in its slot since before, makes room for 4
    bench.end(running[2])
    assert fourth in bench.may_start()
    bench.start(fourth)
    assert bench.may_start() == []  # and 1 and 2 wait for a slot again
    bench.end(third)
    assert bench.may_start()[0] is late[1]


def test_memory_makes_room_for_who_waits_and_brings_back_who_is_asked_for():
    bench = Bench(3, max_loras=1, max_cpu_loras=2)
    assert bench.dropped == [1]  # it had been used least lately when the third came
    first = bench.ask(1)
    assert bench.may_start() == []
    assert (bench.loading, bench.dropped) == ([1], [1, 2])
    assert bench.may_start() == []
    assert bench.loading == [1]  # not again
    bench.slots.loaded(1)
    assert bench.may_start() == [first]


def test_memory_full_of_busy_adapters_still_makes_room():
    bench = Bench(3, max_loras=2, max_cpu_loras=2)
    for key in (1, 2):
        bench.ask(key)
        bench.may_start()
        if key in bench.loading:
            bench.slots.loaded(key)
    running = list(bench.waiting)
    for sequence in running:
        bench.start(sequence)
    stuck = bench.ask(3)
    behind = bench.ask(1)
    assert behind not in bench.may_start()
    oldest = min(running, key=lambda sequence: sequence.number)
    bench.end(oldest)
    assert bench.may_start() == []
    assert bench.loading[-1] == 3
    bench.slots.loaded(3)
    assert bench.may_start() == [stuck]


def test_a_load_that_failed_is_tried_again_when_somebody_asks():
    bench = Bench(2, max_loras=1, max_cpu_loras=1)
    first = bench.ask(1)
    bench.may_start()
    bench.slots.failed(1)
    bench.waiting.remove(first)
    bench.end(first, ran=False)
    assert bench.loading == [1]
    bench.ask(1)
    bench.may_start()
    assert bench.loading == [1, 1]


def test_who_is_retired_goes_with_its_last_user():
    bench = Bench(1, max_loras=1)
    waits, runs = bench.ask(1), bench.ask(1)
    bench.start(runs)
    gone: list[str] = []
    bench.slots.retire(1, lambda: gone.append("gone"))
    assert not bench.slots.knows(1)
    assert bench.may_start() == [waits]
    bench.start(waits)
    bench.end(runs)
    assert not gone
    bench.end(waits)
    assert gone == ["gone"]
    assert bench.dropped == [1]
    bench.slots.loaded(1)  # a load that was under way
    assert bench.dropped == [1, 1]


def test_a_retired_adapter_gives_its_slot_back():
    bench = Bench(2, max_loras=1)
    runs = bench.ask(1)
    bench.start(runs)
    bench.end(runs)
    assert places(bench) == {"memory": 2, "slot": 1}
    bench.slots.retire(1)
    assert places(bench) == {"memory": 1, "slot": 0}
    assert bench.start(bench.ask(2)) == 0
    assert bench.slots.num_slot_evictions == 0


def places(bench: Bench) -> dict[str, float]:
    (resident,) = (metric for metric in bench.slots.metrics() if metric.name == "lora_resident")
    return {place: number for ((_, place),), number in resident.samples.items()}


def test_a_step_that_did_not_run_has_written_no_slot():
    bench = Bench(1, max_loras=1)
    first = bench.ask(1)
    bench.start(first)
    loads = bench.slots.take_loads()
    bench.slots.stops(1)
    bench.waiting.append(first)
    bench.slots.forget(loads)
    assert bench.may_start() == [first]
    bench.start(first)
    assert bench.slots.take_loads() == loads


def test_an_adapter_stays_in_memory_until_the_step_that_writes_its_slot_has_settled():
    bench = Bench(3, max_loras=1, max_cpu_loras=2)
    first = bench.ask(2)
    bench.start(first)
    loads = bench.slots.take_loads()
    bench.end(first)  # its reader has left, while the step is in flight
    bench.ask(3)
    bench.ask(1)
    bench.may_start()
    assert bench.dropped == [1]  # as there was room for two
    bench.slots.retire(2)
    assert bench.dropped == [1]
    bench.slots.settled(loads)
    assert bench.dropped == [1, 2]
    bench.may_start()
    assert bench.loading == [1]


def test_a_slot_that_was_given_up_before_its_step_was_decided_is_not_written():
    bench = Bench(1, max_loras=1)
    first = bench.ask(1)
    bench.start(first)
    bench.slots.retire(1)
    bench.end(first)
    assert bench.dropped == [1]
    assert bench.slots.take_loads() == ()


def test_metrics_count_places_and_label_no_more_adapters_than_a_bound():
    bench = Bench(200, max_loras=1)
    for key in range(1, 201):
        bench.ask(key)
    found = {metric.name: metric.samples for metric in bench.slots.metrics()}
    assert found["lora_adapters"] == {(): 200}
    assert found["lora_resident"] == {(("place", "memory"),): 200, (("place", "slot"),): 0}
    assert len(found["lora_requests"]) == 129
    assert found["lora_requests"][(("adapter", "others"),)] == 72


@given(
    num_adapters=st.integers(1, 6),
    max_loras=st.integers(1, 3),
    spare=st.integers(0, 2),
    num_rows=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_whatever_comes_everybody_gets_a_turn_within_the_bounds(num_adapters, max_loras, spare, num_rows, seed):
    """Loads end in any order, some fail; adapters retire; sequences are preempted; steps are in flight. Bounds hold after every
    turn, and no adapter is dropped that a step in flight writes into a slot."""
    rng = random.Random(seed)
    bench = Bench(num_adapters, max_loras, max_loras + spare)
    running: list[Sequence] = []
    in_flight: list[tuple[AdapterLoad, ...]] = []
    known = [*range(1, num_adapters + 1)]
    for turn in range(600):
        num_dropped = len(bench.dropped)
        if turn < 120 and known and rng.random() < 0.7:
            bench.ask(rng.choice([*known, known[0], None]))  # one is more popular than others
        if turn < 120 and rng.random() < 0.03 and known:
            bench.slots.retire(known.pop(rng.randrange(len(known))))
        if bench.loading and rng.random() < 0.6:
            key = bench.loading.pop(rng.randrange(len(bench.loading)))
            (bench.slots.failed if turn < 120 and rng.random() < 0.2 else bench.slots.loaded)(key)
        startable = bench.may_start()
        while startable and len(running) < num_rows:
            bench.start(startable[0])
            running.append(startable[0])
            startable = [sequence for sequence in bench.waiting if bench.slots.may_start(sequence, order)]
        if running and rng.random() < 0.5:
            sequence = running.pop(rng.randrange(len(running)))
            if sequence.request.adapter is None:
                continue
            if turn < 120 and rng.random() < 0.2:
                bench.slots.stops(sequence.request.adapter.key)
                insort(bench.waiting, sequence, key=order)
            else:
                bench.end(sequence)
        adapters = {sequence.request.adapter.key for sequence in running if sequence.request.adapter}
        assert len(adapters) <= max_loras
        found = {metric.name: metric.samples for metric in bench.slots.metrics()}
        in_memory = found["lora_resident"][(("place", "memory"),)]
        assert in_memory + len(bench.loading) <= max_loras + spare
        in_flight.append(bench.slots.take_loads())
        assert not {load.key for loads in in_flight for load in loads} & {*bench.dropped[num_dropped:]}
        assert all(0 <= load.slot < max_loras for load in in_flight[-1])
        while len(in_flight) > rng.randrange(3):
            bench.slots.settled(in_flight.pop(0))
    assert not bench.waiting
    assert not running
