"""Device inputs: what one upload and one kernel make of a scheduled batch. On the CPU the kernel is interpreted."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.inputs import reference, triton_unpack
from runtime.api import Request, SamplingParams
from runtime.batch import ScheduledRow
from runtime.runner import device_inputs
from runtime.runner.device_inputs import DeviceInputs, StepShape, spans_of
from runtime.runner.step_inputs import StepInputs
from runtime.sequence import Sequence
from tests.ops.places import DEVICES

BLOCK = 4


def scheduled(
    row: int, start: int, ids: tuple[int, ...], *, late=False, blocks=(), first=0, samples=True
) -> ScheduledRow:
    params = SamplingParams(max_tokens=4)
    sequence = Sequence(Request("r", (1,), params), number=0, max_model_len=64, block_size=BLOCK, seed=0)
    return ScheduledRow(sequence, row, start, len(ids) + late, ids, first, blocks, samples, binding=None)


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=[triton_unpack, reference], ids=["triton", "reference"])
def inputs(request, device, monkeypatch):
    monkeypatch.setattr(ops, "unpack", request.param.unpack)
    return DeviceInputs(8, 64, 64, BLOCK, steps_in_flight=2, device=device)


def filled(inputs: DeviceInputs, rows: list[ScheduledRow], shape: StepShape) -> StepInputs:
    inputs.fill(rows, shape)
    return inputs.view(shape, spans_of(rows))


def test_prompts_and_decodes_side_by_side(inputs):
    inputs.last_ids[5] = 77
    rows = [
        scheduled(2, 0, (10, 11, 12, 13, 14), blocks=(9, 7), samples=False),
        scheduled(5, 4, (), late=True, blocks=(3, 6)),
        scheduled(0, 2, (20, 21), blocks=(1,)),
    ]
    step = filled(inputs, rows, StepShape(8, 3, False))
    assert step.ids.tolist() == [10, 11, 12, 13, 14, 77, 20, 21]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 4, 2, 3]
    assert step.slots.tolist() == [36, 37, 38, 39, 28, 24, 6, 7]
    assert step.meta.query_starts.tolist() == [0, 5, 6, 8]
    assert step.meta.context_lens.tolist() == [5, 5, 4]
    assert step.meta.rows.tolist() == [2, 5, 0]
    assert step.meta.spans == ((0, 5, 5), (5, 6, 5), (6, 8, 4))
    assert step.logit_tokens.tolist() == [4, 5, 7]
    assert step.sample_rows.tolist() == [-1, 5, 0]
    assert step.sample_positions.tolist() == [5, 5, 4]
    assert step.meta.block_tables[2, :2].tolist() == [9, 7]


def test_padding_has_no_slot_no_row_and_no_query(inputs):
    inputs.fill([scheduled(1, 0, (5,) * 20, blocks=tuple(range(5)))], StepShape(20, 1, False))
    step = filled(inputs, [scheduled(3, 0, (8, 9), blocks=(2,))], StepShape(16, 4, False))
    assert step.ids.tolist() == [8, 9] + [0] * 14
    assert step.slots.tolist() == [8, 9] + [-1] * 14
    assert step.meta.query_starts.tolist() == [0, 2, 2, 2, 2]
    assert step.meta.context_lens.tolist() == [2, 0, 0, 0]
    assert step.meta.rows.tolist() == [3, -1, -1, -1]
    assert step.sample_rows.tolist() == [3, -1, -1, -1]


def test_tables_outlive_the_step_that_brought_them(inputs):
    inputs.fill([scheduled(4, 0, (1, 2, 3, 4), blocks=(11,))], StepShape(4, 1, False))
    step = filled(inputs, [scheduled(4, 4, (), late=True, blocks=(13,), first=1)], StepShape(1, 1, True))
    assert step.slots.tolist() == [52]
    assert step.meta.block_tables[4, :2].tolist() == [11, 13]
    assert step.logit_tokens is None
    assert step.meta.max_query_len == 1


def test_a_step_may_bring_more_blocks_than_one_upload_holds(inputs, monkeypatch):
    monkeypatch.setattr(device_inputs, "_UPDATES", 3)
    rows = [scheduled(row, 30, (1,), blocks=tuple(range(10 * row, 10 * row + 8))) for row in range(4)]
    step = filled(inputs, rows, StepShape(4, 4, False))
    for row in range(4):
        assert step.meta.block_tables[row, :8].tolist() == list(range(10 * row, 10 * row + 8))
    assert step.slots.tolist() == [(10 * row + 7) * BLOCK + 2 for row in range(4)]
