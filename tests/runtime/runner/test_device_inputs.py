"""Device inputs: what one upload and one kernel make of a scheduled batch. On the CPU the kernel is interpreted."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import ops
from ops.inputs import reference, triton_unpack
from runtime.api import SamplingParams
from runtime.batch import SAMPLE, RowBinding, RowMedia, Sample, ScheduledRow
from runtime.kv.block_table import NewBlocks
from runtime.kv.layout import KVLayout
from runtime.runner import device_inputs
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.step_inputs import StepInputs
from tests.kinds import full, state, window
from tests.ops.places import DEVICES

BLOCK = 4
PLAIN = KVLayout.of((full(1, 8),), BLOCK)
# One layer that sees everything, two with a window that take as many tables, and two of half the size in one block.
HYBRID = KVLayout.of((full(2, 8), *(window(2, 8, 6),) * 2, *(window(1, 8, 6),) * 2), BLOCK)
# Four tokens take 64 bytes of two columns each of two layers; a state of 120 bytes takes a column of twice that: four to a block.
RECURRENT = KVLayout.of((full(1, 4), *(state((30,)),) * 8, full(1, 4)), BLOCK)


def scheduled(
    row: int, start: int, ids: tuple[int, ...], *, late=False, blocks=(), first=0, samples=True, new=()
) -> ScheduledRow:
    new = (NewBlocks(0, first, blocks),) if blocks else new
    return ScheduledRow(0, row, start, len(ids) + late, ids, new_blocks=new, work=SAMPLE if samples else None)


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=[triton_unpack, reference], ids=["triton", "reference"])
def make(request, device, monkeypatch):
    monkeypatch.setattr(ops, "unpack", request.param.unpack)
    monkeypatch.setattr(ops, "place_tokens", request.param.place_tokens)
    return lambda layout: DeviceInputs(8, 64, 64, layout, steps_in_flight=2, device=device)


@pytest.fixture
def inputs(make):
    return make(PLAIN)


def filled(inputs: DeviceInputs, rows: list[ScheduledRow], shape: StepShape) -> StepInputs:
    """Of rows that are as far as they say."""
    for row in rows:
        inputs.num_computed[row.row] = row.start
    inputs.upload(rows, shape)
    return inputs.placed(shape, tuple(rows))


def test_prompts_and_decodes_side_by_side(inputs):
    inputs.last_ids[5] = 77
    rows = [
        scheduled(2, 0, (10, 11, 12, 13, 14), blocks=(9, 7), samples=False),
        scheduled(5, 4, (), late=True, blocks=(3, 6)),
        scheduled(0, 2, (20, 21), blocks=(1,)),
    ]
    step = filled(inputs, rows, StepShape(8, 3, False))
    assert step.forward.input_ids.tolist() == [10, 11, 12, 13, 14, 77, 20, 21]
    assert step.forward.positions.tolist() == [0, 1, 2, 3, 4, 4, 2, 3]
    assert step.forward.slot_mapping[0].tolist() == [36, 37, 38, 39, 28, 24, 6, 7]
    assert step.forward.attn_metadata[0].query_start_loc.tolist() == [0, 5, 6, 8]
    assert step.forward.attn_metadata[0].seq_lens.tolist() == [5, 5, 4]
    assert step.forward.attn_metadata[0].rows.tolist() == [2, 5, 0]
    assert step.forward.attn_metadata[0].spans == ((0, 5, 5), (5, 6, 5), (6, 8, 4))
    assert step.logit_tokens.tolist() == [4, 5, 7]
    assert step.sample_rows.tolist() == [-1, 5, 0]
    assert step.sample_positions.tolist() == [5, 5, 4]
    assert step.forward.attn_metadata[0].block_tables[2, :2].tolist() == [9, 7]


def test_beside_guesses_each_token_is_a_query_of_its_own_but_states_are_by_row(make):
    inputs = make(RECURRENT)
    rows = [
        ScheduledRow(0, 2, 5, 3, (10,), (11, 12), work=Sample(2)),
        ScheduledRow(0, 6, 4, 1, (20,), work=SAMPLE),
    ]
    step = filled(inputs, rows, StepShape(6, 3, False, drafts=True))
    *attending, last = step.forward.attn_metadata
    assert last.query_start_loc.tolist() == [0, 3, 4, 4]
    assert (last.seq_lens.tolist(), last.rows.tolist()) == ([8, 5, 0], [2, 6, -1])
    assert len(step.forward.slot_mapping[-1]) == 3
    assert attending[0].query_start_loc.tolist() == [0, 1, 2, 3, 4, 4, 4]
    assert attending[0].seq_lens.tolist()[:4] == [6, 7, 8, 5]
    assert (attending[0].rows.tolist(), attending[0].max_query_len) == ([2, 2, 2, 6, -1, -1], 1)
    assert step.sample_rows.tolist() == [2, 2, 2, 6, -1, -1]
    assert step.sample_positions.tolist()[:4] == [6, 7, 8, 5]
    assert step.drafts.ids.tolist() == [-1, 11, 12, -1, -1, -1]


def test_a_step_of_decodes_is_packed_as_any_other():
    inputs = DeviceInputs(8, 64, 64, PLAIN, steps_in_flight=2, device=torch.device("cpu"))
    rows = [
        scheduled(3, 9, (), late=True), scheduled(5, 7, (42,)), scheduled(0, 6, (), late=True, samples=False),
        scheduled(7, 5, (), late=True)._replace(work=Sample(masked=True)), scheduled(1, 4, (8,))._replace(restart=4),
    ]  # fmt: skip
    assert StepShape.of(rows).uniform
    any_other, decodes = np.full((2, 30), -7, np.int32)
    assert device_inputs._written(inputs._pack(rows), any_other) == 25
    assert device_inputs._written(device_inputs._pack_uniform(rows), decodes) == 25
    assert decodes.tolist() == any_other.tolist()


def test_padding_has_no_slot_no_row_and_no_query(inputs):
    inputs.upload([scheduled(1, 0, (5,) * 20, blocks=tuple(range(5)))], StepShape(20, 1, False))
    step = filled(inputs, [scheduled(3, 0, (8, 9), blocks=(2,))], StepShape(16, 4, False))
    assert step.forward.input_ids.tolist() == [8, 9] + [0] * 14
    assert step.forward.slot_mapping[0].tolist() == [8, 9] + [-1] * 14
    assert step.forward.attn_metadata[0].query_start_loc.tolist() == [0, 2, 2, 2, 2]
    assert step.forward.attn_metadata[0].seq_lens.tolist() == [2, 0, 0, 0]
    assert step.forward.attn_metadata[0].rows.tolist() == [3, -1, -1, -1]
    assert step.sample_rows.tolist() == [3, -1, -1, -1]


def test_tables_outlive_the_step_that_brought_them(inputs):
    inputs.upload([scheduled(4, 0, (1, 2, 3, 4), blocks=(11,))], StepShape(4, 1, False))
    step = filled(inputs, [scheduled(4, 4, (), late=True, blocks=(13,), first=1)], StepShape(1, 1, True))
    assert step.forward.slot_mapping[0].tolist() == [52]
    assert step.forward.attn_metadata[0].block_tables[4, :2].tolist() == [11, 13]
    assert step.logit_tokens is None
    assert step.forward.attn_metadata[0].max_query_len == 1


def test_a_step_may_bring_more_blocks_than_one_upload_holds(inputs, monkeypatch):
    monkeypatch.setattr(device_inputs, "_UPDATES", 3)
    rows = [scheduled(row, 30, (1,), blocks=tuple(range(10 * row, 10 * row + 8))) for row in range(4)]
    step = filled(inputs, rows, StepShape(4, 4, False))
    for row in range(4):
        assert step.forward.attn_metadata[0].block_tables[row, :8].tolist() == list(range(10 * row, 10 * row + 8))
    assert step.forward.slot_mapping[0].tolist() == [(10 * row + 7) * BLOCK + 2 for row in range(4)]


def test_groups_of_layers_have_tables_and_slots_of_their_own(make):
    inputs = make(HYBRID)
    inputs.last_ids[6] = 5
    full, half, wide = range(3)
    first = (NewBlocks(full, 0, (1, 2)), NewBlocks(wide, 0, (3, 4, 5, 6)), NewBlocks(half, 0, (7, 8)))
    inputs.upload([scheduled(6, 0, (1, 2, 3, 4, 5), new=first)], StepShape(8, 2, False))
    behind = (NewBlocks(full, 2, (9,)), NewBlocks(wide, 2, (10, 11)))  # entries of `half` are still to come
    rows = [scheduled(1, 0, (8, 8), new=(NewBlocks(half, 0, (12,)),)), scheduled(6, 5, (), late=True, new=behind)]
    step = filled(inputs, rows, StepShape(4, 3, False))
    assert step.forward.input_ids.tolist() == [8, 8, 5, 0]
    assert [slots.tolist()[2:] for slots in step.forward.slot_mapping] == [
        [9, -1],
        [2 * 8 * BLOCK + 1, -1],
        [21, -1],
        [25, -1],
    ]
    assert [meta.block_tables[6, :3].tolist() for meta in step.forward.attn_metadata] == [
        [1, 2, 9],
        [14, 16, 0],
        [3, 5, 10],
        [4, 6, 11],
    ]
    assert step.forward.slot_mapping[1][:2].tolist() == [24 * BLOCK, 24 * BLOCK + 1]
    assert {tuple(meta.rows.tolist()) for meta in step.forward.attn_metadata} == {(1, 6, -1)}


def test_states_have_a_slot_a_line_and_lie_beside_blocks_of_many_small_ones(make):
    assert (RECURRENT.block_size, RECURRENT.num_kv_tensors, RECURRENT.num_state_tables) == (2 * BLOCK, 4, 2)
    inputs = make(RECURRENT)
    keys, states = range(2)
    first = (NewBlocks(keys, 0, (5,)), NewBlocks(states, 0, (7, 3)))
    inputs.upload([scheduled(6, 0, (1, 2, 3, 4, 5), new=first)], StepShape(8, 2, False))
    rows = [
        scheduled(1, 0, (8, 8), new=(NewBlocks(keys, 0, (0,)), NewBlocks(states, 0, (2, 4)))),
        scheduled(6, 5, (6, 7, 8, 9), new=(NewBlocks(keys, 1, (1,)),)),
    ]
    step = filled(inputs, rows, StepShape(8, 4, False))
    # Block 5 of the pool is blocks 10 and 11 as kernels count them, block 1 is 2 and 3.
    assert step.forward.slot_mapping[0].tolist() == [0, 1, 45, 46, 47, 8, -1, -1]
    assert step.forward.attn_metadata[0].block_tables[6, :4].tolist() == [10, 11, 2, 3]
    assert [slots.tolist() for slots in step.forward.slot_mapping[1:]] == [[2, 7, -1, -1], [4, 3, -1, -1]]
    decode = filled(inputs, [scheduled(6, 9, (1,))], StepShape(2, 2, True))
    assert [slots.tolist() for slots in decode.forward.slot_mapping] == [[9, -1], [7, -1], [3, -1]]


def test_the_device_counts_a_rows_tokens_from_where_its_binding_says(inputs):
    bound = RowBinding(SamplingParams(max_tokens=4), 0, (1,), (), num_computed=8)
    first = scheduled(3, 8, (5, 6, 7), blocks=(1, 2, 3, 4))._replace(binding=bound)
    inputs.upload([first], StepShape(4, 2, False))
    assert inputs.placed(StepShape(4, 2, False), (first,)).forward.positions.tolist() == [8, 9, 10, 0]
    inputs.num_computed[3] -= 1  # a guess was wrong
    guessed = scheduled(3, 11, (), late=True)._replace(
        num_tokens=3, draft_ids=(8, 9), work=Sample(num_drafts=2)
    )  # 11 if all had been right
    inputs.last_ids[3] = 30
    step = inputs.fill((guessed, scheduled(1, 0, (4,), blocks=(6,))))
    assert step.forward.input_ids.tolist() == [30, 8, 9, 4]
    assert step.forward.positions.tolist() == [10, 11, 12, 0]
    assert step.forward.slot_mapping[0].tolist() == [3 * BLOCK + 2, 3 * BLOCK + 3, 4 * BLOCK, 6 * BLOCK]
    assert step.forward.attn_metadata[0].seq_lens.tolist() == [13, 1]
    assert step.logit_tokens.tolist() == [0, 1, 2, 3]
    assert step.sample_rows.tolist() == [3, 3, 3, 1]
    assert step.sample_positions.tolist() == [11, 12, 13, 1]
    assert inputs.num_computed[[3, 1]].tolist() == [13, 1]


@pytest.mark.parametrize("seed", range(6))
def test_positions_and_slots_of_any_mix_of_rows(make, seed):
    """The table of the fuzzer says where everything must be; batch indices and tokens are padded."""
    chance = random.Random(seed)
    inputs = make(RECURRENT)
    tables = inputs._tensors.block_tables
    tables.copy_(torch.arange(tables.numel(), dtype=torch.int32).view(tables.shape))
    rows = [scheduled(row, chance.randrange(30), (7,) * chance.randint(1, 9)) for row in chance.sample(range(8), 5)]
    num_tokens = sum(row.num_tokens for row in rows)
    shape = StepShape(num_tokens + chance.randrange(5), chance.choice([5, 8]), False)
    step = filled(inputs, rows, shape).forward
    wanted = [(row.row, position) for row in rows for position in range(row.start, row.end)]
    padding = [0] * (shape.num_tokens - num_tokens)
    assert step.positions.tolist() == [position for _, position in wanted] + padding
    slots = [int(tables[0, row, position // BLOCK]) * BLOCK + position % BLOCK for row, position in wanted]
    assert step.slot_mapping[0].tolist() == slots + [-1 for _ in padding]
    for table in (1, 2):
        states = [int(tables[table, row.row, 0]) for row in rows]
        assert step.slot_mapping[table].tolist() == states + [-1] * (shape.num_rows - 5)


def test_every_token_has_its_row_s_adapter_and_padding_has_none(device):
    inputs = DeviceInputs(8, 64, 64, PLAIN, steps_in_flight=2, device=device, adapters=True)

    def bound(row: ScheduledRow, slot: int) -> ScheduledRow:
        return row._replace(binding=RowBinding(SamplingParams(4), 0, [1], (), row.start, adapter_slot=slot))

    def slots(rows: list[ScheduledRow], num_tokens: int) -> list[int] | None:
        shape = replace(inputs.shape_of(rows), num_tokens=num_tokens)
        adapters = filled(inputs, rows, shape).forward.adapters
        return None if adapters is None else adapters.tolist()

    first, plain = scheduled(2, 0, (10, 11, 12), blocks=(9,)), scheduled(5, 0, (7,), blocks=(3,))
    assert slots([bound(first, 3), bound(plain, -1)], 8) == [3, 3, 3, -1, -1, -1, -1, -1]
    assert slots([scheduled(5, 1, (8,)), scheduled(2, 3, (13,))], 2) == [-1, 3]
    assert slots([scheduled(5, 2, (8,))], 1) is None
    again = bound(scheduled(2, 0, (1, 2), blocks=(4,)), 0)
    assert slots([again, scheduled(5, 3, (8,))], 4) == [0, 0, -1, -1]
    assert slots([bound(again, -1), scheduled(5, 4, (8,))], 4) is None


def test_rows_with_pictures_stand_beside_their_positions(make, device):
    inputs = DeviceInputs(8, 64, 64, PLAIN, steps_in_flight=2, device=device, axes=True)
    params = SamplingParams(max_tokens=4)

    def bound(row: int, start: int, num_tokens: int, delta: int, media=None) -> ScheduledRow:
        binding = RowBinding(params, 0, (), (), start, rope_delta=delta)
        return scheduled(row, start, (7,) * num_tokens, blocks=(row,))._replace(binding=binding, media=media)

    by_axis = np.array([[9, 9, 9], [9, 9, 10], [9, 10, 9]], np.int32)
    rows = [bound(5, 0, 3, -1, RowMedia((), by_axis)), bound(2, 2, 2, 3), bound(1, 1, 1, 0)]
    step = filled(inputs, rows, StepShape.of(rows)).forward
    expected = [[*axis, 2 + 3, 3 + 3, 1] for axis in by_axis.tolist()]
    assert step.rope_positions.tolist() == expected
    assert step.positions.tolist() == [0, 1, 2, 2, 3, 1]
    after = [scheduled(5, 3, (), late=True), scheduled(2, 4, (), late=True), scheduled(1, 2, (), late=True)]
    filled(inputs, after, StepShape(4, 4, uniform=True))  # one axis again: a graph serves it
    inputs.num_computed[torch.tensor([5, 2, 1])] = torch.tensor([3, 4, 2], dtype=torch.int32, device=device)
    inputs.upload(after, StepShape(4, 4, uniform=True))
    assert inputs.placed(StepShape(4, 4, uniform=True), None).forward.rope_positions[:3].tolist() == [2, 7, 2]
    again = [bound(2, 0, 2, 0)]  # another tenant
    assert filled(inputs, again, StepShape.of(again)).forward.rope_positions.tolist() == [0, 1]
