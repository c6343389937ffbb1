"""Warm-up: a real step before the first request, so that /health speaks of a model that has run."""

from __future__ import annotations

from runtime.api import Request, SamplingParams
from runtime.batch import RowBinding, ScheduledBatch, ScheduledRow
from runtime.runner.model_runner import ModelRunner
from runtime.sequence import Sequence


def warm_up(runner: ModelRunner, *, num_tokens: int, block_size: int) -> None:
    """One prompt of `num_tokens`, then one decode of it, in the first row and blocks. Nothing of it outlives the call:
    tables and blocks are written anew by whoever gets them next."""
    params = SamplingParams(max_tokens=2, temperature=0.0)
    prompt = (0,) * num_tokens
    sequence = Sequence(
        Request("warm-up", prompt, params), number=0, max_model_len=num_tokens + 2, block_size=block_size, seed=0
    )
    blocks = tuple(range(-(-(num_tokens + 1) // block_size)))
    binding = RowBinding(params, 0, prompt, ())
    for start, ids, new_blocks, bound in ((0, prompt, blocks, binding), (num_tokens, (), (), None)):
        span = len(ids) or 1
        row = ScheduledRow(sequence, 0, start, span, ids, 0, new_blocks, samples=True, binding=bound)
        runner.run(ScheduledBatch((row,), span, 0))
