"""Warm-up: runs real steps before the first request. The steps compile kernels; /health then reports a working model."""

from __future__ import annotations

from itertools import count

from runtime.api import PoolingParams, SamplingParams
from runtime.batch import SAMPLE, Pool, RowBinding, Sample, ScheduledBatch, ScheduledRow, Work
from runtime.kv.block_table import NewBlocks
from runtime.kv.layout import KVLayout
from runtime.models.model import Model

# Uses all sampler features except log-probabilities, whose kernels take 200 MiB of host memory.
_PARAMS = SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, presence_penalty=0.1, seed=0)

POOLED = Pool(PoolingParams(pooling="mean", use_activation=True))  # pooling work that models without a head support


def work_of(model: Model, *, pools: bool = False) -> Work:
    """Return the work of a warm-up row: sampling, or pooling if `pools` or the model does not generate. None for a pipeline
    stage that is not last."""
    if model.spec.hands_on:
        return None
    return SAMPLE if model.spec.generates and not pools else POOLED


def adapter_slots_of(model: Model) -> tuple[int, ...]:
    """Return the adapter slots for warm-up steps: -1 (no adapter), and 0 if the model supports adapters."""
    return (-1,) if model.adapters is None else (-1, 0)


def prompts(
    lengths: list[int], layout: KVLayout, num_blocks: int, work: Work = SAMPLE, adapter_slot: int = -1
) -> ScheduledBatch:
    """Return a step of prompts with `lengths`, in rows 0, 1 and so on. If blocks are too few, the prompts share them."""
    blocks, rows = count(), []
    for row, length in enumerate(lengths):
        ids, new = (0,) * length, []
        for index, group in enumerate(layout.groups):
            num = group.num_blocks(length + 1, layout.block_size)
            new.append(NewBlocks(index, 0, tuple(next(blocks) % num_blocks for _ in range(num))))
        binding = RowBinding(_PARAMS, 0, ids, (), adapter_slot=adapter_slot)
        rows.append(ScheduledRow(row, row, 0, length, ids, new_blocks=tuple(new), work=work, binding=binding))
    return ScheduledBatch(tuple(rows), sum(lengths), 0)


def with_a_short_one(lengths: list[int], max_num_seqs: int) -> list[int]:
    """Return `lengths` with one prompt of two tokens at the end, or [] if it does not fit.

    A special kernel may compute short rows of large steps without a graph, such as steps with media. This warms it up."""
    first, *others = lengths
    return [first - 2, *others[: max_num_seqs - 2], 2] if first > 3 and max_num_seqs > 1 else []


def next_tokens(batch: ScheduledBatch, num_drafts: int = 0) -> ScheduledBatch:
    """Return the step after `batch`: for each of its rows, the last sampled token and `num_drafts` draft tokens.

    The step has no lasting effect, since the next owners overwrite tables and blocks. Rows without sampling remain without
    sampling."""
    num_tokens, guesses = 1 + num_drafts, (0,) * num_drafts
    rows = tuple(
        ScheduledRow(
            row.number, row.row, row.end, num_tokens, (), guesses, work=None if row.work is None else Sample(num_drafts)
        )
        for row in batch.rows
    )
    return ScheduledBatch(rows, num_tokens * len(rows), 0)
