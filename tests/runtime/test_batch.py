"""A scheduled batch is plain data."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np

from runtime.api import MediaItem
from runtime.batch import SAMPLE, BlockCopy, EncoderWork, ScheduledBatch, ScheduledRow, columns, decode_row
from runtime.kv.block_table import NewBlocks
from tests.pooling import LAST
from tests.runtime.scheduling_case import GROUPS, make, sequence


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
    other = ScheduledBatch((pooling,), 3, 0, (BlockCopy(3, 4),))
    assert pickle.loads(pickle.dumps(other)) == other
    item = MediaItem("image", b"key", np.arange(2, dtype=np.int32), {"pixel_values": np.ones(3, np.float32)})
    (work,) = pickle.loads(pickle.dumps(replace(other, encoder_work=(EncoderWork(4, b"key", item),)))).encoder_work
    assert (work.number, work.key, work.item.positions.tolist()) == (4, b"key", [0, 1])
    assert work.item.inputs["pixel_values"].tolist() == [1, 1, 1]


def test_a_row_of_a_decode_is_what_the_class_makes_of_it():
    for ids, blocks in (((), ()), ((7,), (NewBlocks(0, 3, (5,)),))):
        row = decode_row(4, 2, 30, ids, blocks)
        assert row == ScheduledRow(4, 2, 30, 1, ids, new_blocks=blocks, work=SAMPLE)
        assert type(row) is ScheduledRow


def test_columns_are_what_rows_have_by_field():
    rows = [decode_row(4, 2, 30, (), ()), ScheduledRow(9, 1, 0, 3, (5, 6, 7))]
    of = columns(rows)
    assert (of.number, of.token_ids, of.work) == ((4, 9), ((), (5, 6, 7)), (SAMPLE, None))
    assert set(columns([])) == {()}


def test_a_binding_says_from_where_on_the_row_is_computed_and_brings_no_matchers():
    scheduler = make(budget=64)
    scheduler.add(sequence(1, range(20, 37)))
    scheduler.add(sequence(2, range(20, 37), matchers=(lambda: None,)))
    first, second = (row.binding for row in scheduler.schedule().rows)
    assert (first.num_computed, first.masked) == (0, False)
    assert (second.num_computed, second.masked, second.params.matchers) == (16, True, ())
