"""Input buffers: what the model and the sampler read of a scheduled batch on a CPU."""

from __future__ import annotations

import torch

from runtime.api import SamplingParams
from runtime.batch import RowBinding, Sample
from runtime.runner.input_buffers import InputBuffers
from tests.runtime.runner.test_device_inputs import PLAIN, scheduled


def test_a_step_of_pieces_of_prompts_alone_wants_no_logits():
    rows = (
        scheduled(0, 0, (10, 11, 12), blocks=(2,), samples=False),
        scheduled(1, 0, (20,), blocks=(3,), samples=False),
    )
    step = InputBuffers(4, 64, PLAIN).fill(rows)
    assert torch.randn(4, 8)[step.logit_tokens].shape == (0, 8)
    assert (step.sample_rows.tolist(), step.sample_positions.tolist()) == ([], [])
    assert step.sample_rows.stride() == (1,)  # numpy's empty arrays have others, which kernels refuse
    assert step.forward.positions.tolist() == [0, 1, 2, 0]


def test_tokens_that_sample_are_the_last_of_their_rows():
    rows = (scheduled(0, 0, (10, 11, 12), blocks=(2,)), scheduled(1, 0, (20, 21), blocks=(3,), samples=False))
    step = InputBuffers(4, 64, PLAIN).fill(rows)
    assert step.logit_tokens.tolist() == [2]
    assert (step.sample_rows.tolist(), step.sample_positions.tolist()) == ([0], [3])


def test_counts_go_on_from_the_binding_and_guesses_have_logits_of_their_own():
    buffers = InputBuffers(4, 64, PLAIN)
    bound = RowBinding(SamplingParams(max_tokens=4), 0, (1,), (), num_computed=8)
    buffers.fill((scheduled(3, 8, (5, 6, 7), blocks=(1, 2, 3, 4))._replace(binding=bound),))
    buffers.num_computed[3] -= 1
    buffers.last_ids[3] = 30
    guessed = scheduled(3, 11, (), late=True)._replace(num_tokens=3, draft_ids=(8, 9), work=Sample(num_drafts=2))
    step = buffers.fill((scheduled(1, 0, (4, 4), blocks=(6,)), guessed))
    assert step.forward.input_ids.tolist() == [4, 4, 30, 8, 9]
    assert step.forward.positions.tolist() == [0, 1, 10, 11, 12]
    assert step.forward.slot_mapping[0].tolist() == [24, 25, 14, 15, 16]
    assert step.forward.attn_metadata[0].seq_lens.tolist() == [2, 13]
    assert (step.logit_tokens.tolist(), step.sample_rows.tolist()) == ([1, 2, 3, 4], [1, 3, 3, 3])
    assert step.sample_positions.tolist() == [2, 11, 12, 13]
    assert buffers.num_computed.tolist() == [0, 2, 0, 13]
