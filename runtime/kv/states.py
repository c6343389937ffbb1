"""Copies of recurrent states, kept while a step verifies drafts, because a state cannot be rolled back.

A sequence with a copy is in no other step until its step has settled, so the copy is the state to restore."""

from __future__ import annotations

from typing import NamedTuple

from runtime.kv.block_pool import BlockIds
from runtime.kv.block_table import BlockTable
from runtime.kv.sequence_blocks import SequenceBlocks
from runtime.sequence import Sequence


class StateCopy(NamedTuple):
    """Recurrent states as they were behind token `start` - 1: for each block table of states, copies of its blocks."""

    start: int
    block_ids: tuple[BlockIds, ...]


def has_states(blocks: SequenceBlocks) -> bool:
    """Return whether some layers keep recurrent states in `blocks`."""
    return any(group.state for group in blocks.cache.groups)


def num_state_blocks(sequence: Sequence) -> int:
    """Return the number of blocks that a copy of the sequence's states takes."""
    return sum(len(table.ids) for table in _tables(sequence))


def keep(blocks: SequenceBlocks, sequence: Sequence) -> StateCopy:
    """Copy the states of `sequence`, before its next step reads ids on trial, and pause it. There are blocks for the copy."""
    kept = []
    for table in _tables(sequence):
        block_ids = blocks.allocate(len(table.ids))
        for source, target in zip(table.ids, block_ids, strict=True):
            blocks.copies.add(source, target)
        kept.append(block_ids)
    sequence.is_paused = True
    return StateCopy(sequence.num_computed_tokens, tuple(kept))


def drop(blocks: SequenceBlocks, sequence: Sequence, copy: StateCopy) -> None:
    """Release a copy that is not needed: all ids on trial were right, or the sequence gives its blocks back."""
    for block_ids in copy.block_ids:
        blocks.pool.release(block_ids, blocks.cache)
    sequence.is_paused = False


def go_back(blocks: SequenceBlocks, sequence: Sequence, copy: StateCopy) -> None:
    """Put the copy in the place of the states, which have read wrong ids. The sequence's next step reads again what was right."""
    for table, block_ids in zip(_tables(sequence), copy.block_ids, strict=True):
        blocks.pool.release(table.replace(block_ids), blocks.cache)
    sequence.has_new_blocks = True
    sequence.num_computed_tokens = sequence.rewound_to = copy.start
    sequence.is_paused = False


def _tables(sequence: Sequence) -> list[BlockTable]:
    return [table for table in sequence.tables if table.group.state]
