"""Copies of recurrent states, kept while a step verifies draft tokens, because a state cannot be rolled back.

A sequence with a copy is in no other step until that step has completed. The copy is then the state to restore."""

from __future__ import annotations

from typing import NamedTuple

from runtime.kv.block_pool import BlockIds
from runtime.kv.block_table import BlockTable
from runtime.kv.sequence_blocks import SequenceBlocks
from runtime.sequence import Sequence


class StateCopy(NamedTuple):
    """Copy of a sequence's recurrent states before token `start`. `block_ids`: for each block table of states, ids of the
    copies."""

    start: int
    block_ids: tuple[BlockIds, ...]


def has_states(blocks: SequenceBlocks) -> bool:
    """Return whether the model has recurrent layers, whose states are in `blocks`."""
    return any(group.state for group in blocks.cache.groups)


def num_state_blocks(sequence: Sequence) -> int:
    """Return the number of blocks for a copy of the recurrent states of `sequence`."""
    return sum(len(table.ids) for table in _tables(sequence))


def keep(blocks: SequenceBlocks, sequence: Sequence) -> StateCopy:
    """Copy the recurrent states of `sequence` and pause it. Called before a step verifies its draft tokens. The caller must
    check that enough blocks are free."""
    kept = []
    for table in _tables(sequence):
        block_ids = blocks.allocate(len(table.ids))
        for source, target in zip(table.ids, block_ids, strict=True):
            blocks.copies.add(source, target)
        kept.append(block_ids)
    sequence.is_paused = True
    return StateCopy(sequence.num_computed_tokens, tuple(kept))


def drop(blocks: SequenceBlocks, sequence: Sequence, copy: StateCopy) -> None:
    """Release a copy that is no longer needed and resume `sequence`. Called when all draft tokens were accepted, or when the
    sequence releases its blocks."""
    for block_ids in copy.block_ids:
        blocks.pool.release(block_ids, blocks.cache)
    sequence.is_paused = False


def go_back(blocks: SequenceBlocks, sequence: Sequence, copy: StateCopy) -> None:
    """Replace the states of `sequence`, which include rejected draft tokens, by `copy`, and resume it. Its next step computes
    the accepted tokens again."""
    for table, block_ids in zip(_tables(sequence), copy.block_ids, strict=True):
        blocks.pool.release(table.replace(block_ids), blocks.cache)
    sequence.has_new_blocks = True
    sequence.num_computed_tokens = sequence.rewound_to = copy.start
    sequence.is_paused = False


def _tables(sequence: Sequence) -> list[BlockTable]:
    return [table for table in sequence.tables if table.group.state]
