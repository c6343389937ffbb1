"""What must hold of the scheduler's books at any moment."""

from collections import Counter

from runtime.scheduler import Scheduler
from runtime.sequence import Sequence, SequenceStatus


def check_pool(scheduler: Scheduler) -> None:
    """Every block is counted once for each table it stands in and each copy under way, within the pool or not; what is free
    is neither, and more than what tables are promised."""
    uses = Counter(block_id for sequence in scheduler.running for block_id in _ids(sequence))
    uses.update(scheduler.blocks.copies.block_ids)
    for feature in scheduler.features:
        uses.update(getattr(feature, "block_ids", ()))
    copies = (getattr(claim, "copy", None) for sequence in scheduler.running for claim in sequence.claims)
    kept = (copy.block_ids for copy in copies if copy is not None)
    uses.update(block_id for tables in kept for block_ids in tables for block_id in block_ids)
    for block_id in range(scheduler.blocks.pool.num_blocks):
        assert scheduler.blocks.pool.count(block_id) == uses[block_id]
    num_reserved = sum(table.num_reserved for sequence in scheduler.running for table in sequence.tables)
    assert scheduler.blocks.pool.num_reserved == num_reserved
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks - len(uses) - num_reserved >= 0


def check_tables(scheduler: Scheduler, *, drafting: bool = False) -> None:
    """Running sequences have a row each and, for every group of layers, blocks for what a next query sees of what they computed,
    with what they are promised enough for a whole prompt, and no more than planned for; no other sequence has any. `drafting`: some
    may have blocks for drafts that were wrong, or are still to be made."""
    rows = [sequence.row for sequence in scheduler.running]
    assert None not in rows
    assert len(set(rows)) == len(rows) <= scheduler.limits.max_num_seqs
    for sequence in scheduler.running:
        assert sequence.status is SequenceStatus.RUNNING
        assert len(set(_ids(sequence))) == len(_ids(sequence))
        for group, table in zip(scheduler.blocks.cache.groups, sequence.tables, strict=True):
            assert table.num_slots >= sequence.num_computed_tokens
            size = scheduler.blocks.cache.entry_size
            first = max(0, sequence.num_computed_tokens - sequence.num_in_flight)
            assert table.first_entry <= group.first_in_window(first) // group.kind.entry_tokens(size)
            num_entries = group.kind.num_entries(table.num_slots, size)
            assert len(table.ids) == (num_entries - table.first_entry) * group.width
            budget = scheduler.limits.max_num_batched_tokens
            num_tokens = sequence.max_tokens_total if drafting else sequence.num_tokens
            assert len(table.ids) + table.num_reserved <= group.max_blocks(num_tokens, budget, size)
            if group.window is None:
                has_or_promised = num_entries + table.num_reserved // group.width
                assert group.kind.num_tokens(has_or_promised, size) >= sequence.num_prompt_tokens
        assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens
        assert sequence.num_in_flight >= 0
    for sequence in scheduler.waiting:
        assert sequence.status is SequenceStatus.WAITING
        assert sequence.row is None
        assert not sequence.tables
    for line in (scheduler.running, scheduler.waiting):
        assert [scheduler.policy.order(s) for s in line] == sorted(scheduler.policy.order(s) for s in line)


def _ids(sequence: Sequence) -> list[int]:
    return [block_id for table in sequence.tables for block_id in table.ids]
