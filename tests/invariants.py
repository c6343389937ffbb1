"""What must hold of the scheduler's books at any moment."""

from collections import Counter

from runtime.scheduler import Scheduler
from runtime.sequence import Status


def check_pool(scheduler: Scheduler) -> None:
    """Every block is counted once for each table it stands in; free means count 0."""
    uses = Counter(block_id for sequence in scheduler.running for block_id in sequence.table.ids)
    for block_id in range(scheduler.pool.num_blocks):
        assert scheduler.pool.count(block_id) == uses[block_id]
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - len(uses)


def check_tables(scheduler: Scheduler) -> None:
    """Running sequences have a row each and blocks for what they computed; no other sequence has any."""
    rows = [sequence.row for sequence in scheduler.running]
    assert None not in rows
    assert len(set(rows)) == len(rows) <= scheduler.limits.max_num_seqs
    for sequence in scheduler.running:
        assert sequence.status is Status.RUNNING
        assert len(set(sequence.table.ids)) == len(sequence.table.ids)
        assert sequence.table.num_slots >= sequence.num_computed_tokens
        assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens
    for sequence in scheduler.waiting:
        assert sequence.status is Status.WAITING
        assert sequence.row is None
        assert not sequence.table.ids
    for line in (scheduler.running, scheduler.waiting):
        assert [scheduler.policy(s) for s in line] == sorted(scheduler.policy(s) for s in line)
