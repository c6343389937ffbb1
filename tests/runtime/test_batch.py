"""A scheduled batch is plain data."""

from __future__ import annotations

import pickle

from runtime.batch import BlockCopy, EncoderWork, ScheduledBatch, ScheduledRow
from tests.pooling import LAST
from tests.runtime.test_scheduler import GROUPS, make, sequence


def test_a_batch_survives_a_wire_unchanged():
    scheduler = make(budget=64, groups=GROUPS["hybrid"], num_blocks=128)
    scheduler.add(sequence(1, range(20, 33), matchers=(lambda: None,), logit_bias={3: 1.5}))
    scheduler.add(sequence(2, range(20, 37), prompt_logprobs=2, allowed_token_ids=frozenset({5, 6})))
    scheduler.add(sequence(3, [9] * 40))
    batch = scheduler.schedule()
    assert [row.masked for row in batch.rows] == [True, False, False]
    assert [row.samples for row in batch.rows] == [True, True, False]
    for each in (batch, *batch.split({batch.rows[0].row})):
        assert pickle.loads(pickle.dumps(each)) == each
    pooling = ScheduledRow(4, 2, 0, 3, (1, 2, 3), work=LAST)
    other = ScheduledBatch((pooling,), 3, 0, (BlockCopy(3, 4),), (EncoderWork(4, b"key"),))
    assert pickle.loads(pickle.dumps(other)) == other


def test_a_binding_says_from_where_on_the_row_is_computed_and_brings_no_matchers():
    scheduler = make(budget=64)
    scheduler.add(sequence(1, range(20, 37)))
    scheduler.add(sequence(2, range(20, 37), matchers=(lambda: None,)))
    first, second = (row.binding for row in scheduler.schedule().rows)
    assert (first.num_computed, first.masked) == (0, False)
    assert (second.num_computed, second.masked, second.params.matchers) == (16, True, ())
