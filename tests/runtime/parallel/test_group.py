"""Ranks that exchange tensors: the same bits for all, and one that fails takes others along in its own step alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from runtime.parallel.group import Apart, Gone, Group, HostRank

SIZE = 3


@pytest.fixture
def ranks():
    group = Group(SIZE)
    return [HostRank(group, number) for number in range(SIZE)]


def step(ranks, work):
    """What `work(rank)` gives or raises, of each rank, within the meeting of its next step."""

    def of(rank):
        meeting = rank.group.claim(rank.number)
        try:
            return rank.within(meeting, lambda: work(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(of, ranks))


def test_sums_have_the_same_bits_everywhere_and_leave_what_was_given(ranks):
    given = [torch.tensor([[1e8, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[-1e8, 4.0]])]
    sums = step(ranks, lambda rank: rank.sum(given[rank.number]))
    expected = (given[0] + given[1]) + given[2]  # in this order: float32 has no room for 1e8 + 1
    assert all(torch.equal(each, expected) for each in sums)
    assert [each[0, 1].item() for each in given] == [1.0, 2.0, 4.0]
    assert len({each.data_ptr() for each in sums}) == SIZE


def test_columns_stand_in_the_order_of_the_ranks(ranks):
    together = step(ranks, lambda rank: rank.concat(torch.full((2, 1), float(rank.number))))
    assert all(each.tolist() == [[0.0, 1.0, 2.0]] * 2 for each in together)


def test_a_rank_that_fails_takes_the_others_out_of_its_step_and_of_no_other(ranks):
    def work(rank):
        rank.sum(torch.ones(1))
        if rank.number == 1:
            raise KeyError("broken")
        return rank.sum(torch.ones(1))

    assert [type(each) for each in step(ranks, work)] == [Apart, KeyError, Apart]
    assert [each.item() for each in step(ranks, lambda rank: rank.sum(torch.ones(1)))] == [3.0] * SIZE


def test_a_rank_by_itself_waits_for_nobody(ranks):
    def work(rank):
        if rank.number == 0:
            with rank.by_itself():
                assert rank.sum(torch.ones(1)).item() == SIZE  # of its own alone
                assert rank.concat(torch.ones(1, 2)).shape == (1, 2 * SIZE)
        return rank.least(rank.number)

    assert step(ranks, work) == [0] * SIZE


def test_a_rank_may_be_a_step_ahead(ranks):
    first, second = ranks[0].group.claim(0), ranks[0].group.claim(0)
    assert first is not second
    assert [ranks[0].group.claim(1), ranks[0].group.claim(1)] == [first, second]


def test_nobody_waits_for_one_that_has_gone(ranks):
    others, waiting = ranks[1:], threading.Semaphore(0)

    def work(rank):
        waiting.release()
        return rank.sum(torch.ones(1))

    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(step, others, work)
        for _ in others:
            waiting.acquire()
        ranks[0].group.end()
        assert [type(each) for each in ends.result()] == [Gone, Gone]
    with pytest.raises(Gone):
        ranks[0].group.claim(0)
