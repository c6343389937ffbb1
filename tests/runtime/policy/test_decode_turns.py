"""Decode turns: who decodes in a step that has no room for all."""

from __future__ import annotations

from collections import Counter

import pytest

from runtime.scheduler import Scheduler
from tests.runtime.scheduling_case import SomeDecode, make, sequence


def streams(scheduler: Scheduler, asked: dict[str, list[int]]) -> list[list[int]]:
    """The numbers of each request's rows, of callers with requests of so many rows; all of them decode when this returns."""
    requests: list[list[int]] = []
    number = 0
    for caller, widths in asked.items():
        for width in widths:
            rows = [*range(number, number + width)]
            for row in rows:
                limits = {"max_tokens": 1000, "limit": 2000}
                scheduler.add(sequence(row, [row + 10], caller=caller.encode(), group=number, **limits))
            requests.append(rows)
            number += width
    while scheduler.waiting or any(not one.output_ids for one in scheduler.running):
        step(scheduler)
    return requests


def step(scheduler: Scheduler) -> list[int]:
    """Who is in the next step."""
    batch = scheduler.schedule()
    scheduler.settle(batch, [[50]] * len(batch.sampling_rows))
    return sorted(row.number for row in batch.rows)


def turns(asked: dict[str, list[int]], room: int, steps: int) -> list[list[int]]:
    """How many of so many steps each row of each request was in, where a step has room for `room` decodes."""
    scheduler = make(num_blocks=4000, seqs=200, budget=300, step_budget=SomeDecode(None, room=lambda: room))
    requests = streams(scheduler, asked)
    had = Counter(number for _ in range(steps) for number in step(scheduler))
    return [[had[number] for number in rows] for rows in requests]


def test_rows_of_a_wide_request_take_turns_and_a_stream_has_every_one():
    assert turns({"a": [1, 128]}, 9, 128) == [[128], [8] * 128]


@pytest.mark.parametrize(
    "asked", [{"a": [1] * 16}, {"a": [1], "b": [1], "c": [1]}, {"a": [3]}, {"a": [2, 2], "b": [4]}]
)
def test_where_all_ask_for_as_much_all_decode_in_every_step(asked):
    assert {num for rows in turns(asked, 1, 5) for num in rows} == {5}


def test_many_requests_of_one_caller_take_turns_beside_the_one_of_another():
    assert turns({"a": [1], "b": [1] * 40}, 11, 40) == [[40], *[[10]] * 40]


def test_every_caller_has_as_much_as_the_one_with_least_and_the_rest_is_shared_evenly():
    had = turns({"a": [1, 1], "b": [1] * 9, "c": [9]}, 8, 90)
    assert had[:2] == [[90], [90]]
    assert sum(map(sum, had[2:11])) == sum(had[11]) == 270


def test_however_little_room_there_is_nobody_starves():
    assert min(num for rows in turns({"a": [1, 20], "b": [7]}, 0, 120) for num in rows) >= 5


def test_without_a_bound_all_decode_as_on_a_gpu():
    scheduler = make(num_blocks=4000, seqs=300, budget=400)
    requests = streams(scheduler, {"a": [1, 255]})
    assert step(scheduler) == [number for rows in requests for number in rows]


def test_who_rests_is_in_line_for_blocks_all_the_same():
    """The pool is short: rows are preempted from the end, come back, and everybody gets to the end."""
    scheduler = make(num_blocks=24, seqs=6, budget=40, step_budget=SomeDecode(None, room=lambda: 2))
    asked = [sequence(number, range(10, 14), 24, group=max(1, number)) for number in range(6)]
    for one in asked:
        scheduler.add(one)
    while any(one.finish is None for one in asked):
        step(scheduler)
    assert scheduler.sequences.num_preemptions
    assert all(one.num_output_tokens == 24 for one in asked)
    assert scheduler.blocks.pool.num_free == 24
