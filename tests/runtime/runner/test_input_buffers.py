"""Input buffers: what the model and the sampler read of a scheduled batch on a CPU."""

from __future__ import annotations

import torch

from runtime.batch import ScheduledBatch
from runtime.runner.input_buffers import InputBuffers
from tests.runtime.runner.test_device_inputs import PLAIN, scheduled


def test_a_step_of_pieces_of_prompts_alone_wants_no_logits():
    rows = (
        scheduled(0, 0, (10, 11, 12), blocks=(2,), samples=False),
        scheduled(1, 0, (20,), blocks=(3,), samples=False),
    )
    step = InputBuffers(4, 64, PLAIN).fill(ScheduledBatch(rows, 4, 0))
    assert torch.randn(4, 8)[step.logit_tokens].shape == (0, 8)
    assert (step.sample_rows.tolist(), step.sample_positions.tolist()) == ([], [])
    assert step.sample_rows.stride() == (1,)  # numpy's empty arrays have others, which kernels refuse
    assert step.positions.tolist() == [0, 1, 2, 0]


def test_tokens_that_sample_are_the_last_of_their_rows():
    rows = (scheduled(0, 0, (10, 11, 12), blocks=(2,)), scheduled(1, 0, (20, 21), blocks=(3,), samples=False))
    step = InputBuffers(4, 64, PLAIN).fill(ScheduledBatch(rows, 5, 0))
    assert step.logit_tokens.tolist() == [2]
    assert (step.sample_rows.tolist(), step.sample_positions.tolist()) == ([0], [3])
