"""Blocks of sequences: reservation at the start, allocation as a sequence grows, insertion in the prefix cache, and release.

When a sequence starts, blocks for all its known tokens are reserved. Its steps allocate them as they need them. Blocks that
leave the window are released before the next step is scheduled. This module does not depend on steps or rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from runtime.api.media import media_of_blocks
from runtime.kv.block_copies import BlockCopies
from runtime.kv.block_pool import BlockIds, BlockPool
from runtime.kv.block_table import BlockTable, NewBlocks
from runtime.kv.kinds import Nothing
from runtime.kv.prefix_cache import NO_EXTRAS, Match, PrefixCache

if TYPE_CHECKING:
    from runtime.kv.layout import LayerGroup
    from runtime.sequence import Sequence

_NEW_SHARE = 0.1  # weight of the last sequence that started in `hit_share`


class _Refusal(NamedTuple):
    """State of pool and prefix cache when sequence `number` did not fit. As long as it is unchanged, the sequence cannot fit: free
    blocks can only have become fewer. A hit used by another sequence saves one allocation, but that block is no longer free."""

    number: int
    match: Match
    num_freed: int
    num_running: int


class SequenceBlocks:
    """Blocks of all sequences: allocation, prefix cache hits and release. The functions in `when_allocated` are called with the
    ids of newly allocated blocks."""

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self.pool = pool
        self.cache = cache
        self.copies = BlockCopies(pool, cache)
        self.when_allocated: list[Callable[[BlockIds], None]] = []
        self.has_windows = any(group.window is not None for group in cache.groups)
        self.blocks_per_entry = sum(group.width for group in cache.groups if group.kind.grows)
        # Of an encoder's sequences, whose layers keep nothing: these stay empty, so all may have the same.
        keeps_nothing = all(isinstance(group.kind, Nothing) for group in cache.groups)
        self._empty_tables = (
            tuple(BlockTable(cache.entry_size, group) for group in cache.groups) if keeps_nothing else ()
        )
        self._refusal: _Refusal | None = None  # the last
        self.num_prefix_queries = 0  # tokens looked up, and found
        self.num_prefix_hits = 0
        self.hit_share = 0.0  # of the tokens of sequences that started lately, found

    # --- a sequence starts ----------------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence, num_running: int, longest_step: int) -> bool:
        """Give `sequence` block tables with its cached prefix, and reserve blocks for its other known tokens. Return False and
        change nothing if there are too few blocks.

        All known tokens are reserved so that a prompt that starts can finish. One spare entry for each of the `num_running`
        sequences prevents an immediate preemption. `longest_step`: maximum number of tokens in a step."""
        cache = self.cache
        if self._empty_tables:
            sequence.tables, sequence.num_slots = self._empty_tables, self._empty_tables[0].num_slots
            return True
        if cache.enabled:
            self.extend_hashes(sequence)
        match = cache.match(sequence.block_hashes, sequence.num_reusable // cache.block_size)
        for claim in sequence.claims:
            if (num_entries := claim.reuses(match)) < match.num_entries:
                match = cache.match(sequence.block_hashes, num_entries)
        refusal = _Refusal(sequence.number, match, self.pool.num_freed, num_running)
        if refusal == self._refusal:
            return False
        if not self._start(sequence, match, num_running, longest_step) and (
            # A copied state needs more blocks than a computed one. A sequence that runs alone must fit without a hit.
            num_running or not self._start(sequence, cache.match((), 0), num_running, longest_step)
        ):
            self._refusal = refusal
            return False
        self._refusal = None
        num_tokens, start = sequence.num_tokens, sequence.num_computed_tokens
        self.hit_share += _NEW_SHARE * (start / num_tokens - self.hit_share)
        if cache.enabled and not sequence.request.is_probe:
            self.num_prefix_queries += num_tokens
            self.num_prefix_hits += start
        if not sequence.is_resumed:
            sequence.num_cached_tokens = start
        return True

    def _start(self, sequence: Sequence, match: Match, num_running: int, longest_step: int) -> bool:
        """Give `sequence` block tables that begin with `match`. Return False and change nothing if there are too few blocks."""
        cache, num_tokens = self.cache, sequence.num_tokens
        start = match.num_entries * cache.block_size
        tables = tuple(BlockTable(cache.entry_size, group, start) for group in cache.groups)
        copied = [
            self._written_again(group, start, block_ids)
            for group, block_ids in zip(cache.groups, match.ids, strict=True)
        ]
        for table, block_ids, to_copy in zip(tables, match.ids, copied, strict=True):
            table.append(block_ids[: len(block_ids) - len(to_copy)])
            table.num_reserved = table.num_missing(table.group.reserved_to(start, num_tokens, longest_step))
        missing = sum(table.num_reserved for table in tables)
        room = self.pool.num_free - missing - self.blocks_per_entry * num_running
        if room < sum(map(len, match.ids)) and (room < 0 or room < sum(map(self.pool.num_idle, match.ids))):
            return False
        for block_ids in match.ids:
            self.pool.share(block_ids)
        self.pool.reserve(missing)
        for table, to_copy in zip(tables, copied, strict=True):
            if to_copy:
                self._copy(to_copy, table)
        sequence.tables = tables
        sequence.has_new_blocks = True
        sequence.num_computed_tokens = start
        sequence.num_registered_blocks = match.num_entries
        return True

    def _written_again(self, group: LayerGroup, start: int, block_ids: BlockIds) -> BlockIds:
        """Return the blocks in `block_ids`, a prefix hit, that the sequence would overwrite when it continues at token `start`.
        They are the last entry of a group, if each step replaces it or if it is not full."""
        if group.kind.is_replaced or (group.kind.grows and start % self.cache.entry_size):
            return block_ids[len(block_ids) - group.width :] if block_ids else block_ids
        return block_ids[:0]

    def _copy(self, block_ids: BlockIds, table: BlockTable) -> None:
        """Append a copy of the shared blocks `block_ids` to `table`, in reserved blocks, and release `block_ids`."""
        own = self.allocate(len(block_ids), len(block_ids))
        table.num_reserved -= len(block_ids)
        table.append(own)
        for source, target in zip(block_ids, own, strict=True):
            self.copies.add(source, target)
        self.pool.release(block_ids, self.cache)

    def give_back(self, sequence: Sequence) -> None:
        """Release the blocks of `sequence` and cancel its reservations."""
        for table in sequence.tables:
            self.pool.release(table.ids, self.cache)
            self.pool.unreserve(table.num_reserved)
        sequence.tables = ()
        sequence.num_registered_blocks = 0

    # --- a sequence grows -----------------------------------------------------------------------------------------

    def num_missing(self, sequence: Sequence, end: int) -> int:
        """Return how many blocks `sequence` needs for its tokens up to `end`, in addition to its own and its reserved ones."""
        return sum(
            max(0, table.num_missing(end) - table.num_reserved) for table in sequence.tables if end > table.num_slots
        )

    def extend(self, sequence: Sequence, end: int) -> None:
        """Allocate blocks for the tokens of `sequence` up to `end`, reserved ones first. The caller must check that enough are
        free."""
        if self._empty_tables:
            return
        for table in sequence.tables:
            if num := table.num_missing(end):
                num_reserved = min(num, table.num_reserved)
                table.num_reserved -= num_reserved
                table.append(self.allocate(num, num_reserved))
                sequence.has_new_blocks = True
        sequence.num_slots = min(table.num_slots for table in sequence.tables)

    def allocate(self, num: int, num_reserved: int = 0) -> BlockIds:
        """Allocate `num` blocks, `num_reserved` of them from reservations, and remove them from the prefix cache. Return their
        ids."""
        block_ids = self.pool.allocate(num, num_reserved)
        self.cache.forget(block_ids)
        for call in self.when_allocated:
            call(block_ids)
        return block_ids

    def release_out_of_window(self, sequence: Sequence) -> None:
        """Release blocks that no later query of `sequence` reads, even if all draft tokens of steps in flight are rejected."""
        first = sequence.num_computed_tokens - sequence.num_in_flight  # if no unsettled step gained anything
        for table in sequence.tables:
            if out_of_window := table.take_out_of_window(first):
                self.pool.release(out_of_window, self.cache)

    def take_new(self, sequence: Sequence) -> tuple[NewBlocks, ...]:
        """Return the blocks that were added to the tables of `sequence` since the last call. The batch sends them to the device."""
        if not sequence.has_new_blocks:
            return ()
        sequence.has_new_blocks = False
        taken = (NewBlocks(group, *table.take_unsent()) for group, table in enumerate(sequence.tables))
        return tuple(new for new in taken if new.ids)

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def register(self, sequence: Sequence, num_full: int) -> None:
        """Insert the first `num_full` blocks of `sequence` in the prefix cache, as far as they are new. This happens before the
        blocks are written: a sequence that hits them runs in the same step or later, and each layer stores all keys before any
        query reads."""
        self.extend_hashes(sequence)
        for group, table in enumerate(sequence.tables):
            per = self.cache.entry_blocks(table.group)
            # A window that is shorter than what is in flight has given up blocks whose ids were not known yet.
            first, end = max(sequence.num_registered_blocks // per, table.first_entry), num_full // per
            if first < end and table.group.kind.grows:
                names = sequence.block_hashes[first * per + per - 1 : end * per : per]
                self.cache.insert(names, group, table.entry_ids(first, end))
        first, sequence.num_registered_blocks = sequence.num_registered_blocks, num_full
        for claim in sequence.claims:
            claim.registered(first)

    def extend_hashes(self, sequence: Sequence) -> None:
        """Compute the missing block hashes of `sequence`, for all full blocks of known tokens."""
        block_hashes, num_tokens = sequence.block_hashes, sequence.num_known_tokens
        start = len(block_hashes) * self.cache.block_size
        if num_tokens - start >= self.cache.block_size:
            ids, media = sequence.known_ids(start, num_tokens), sequence.request.media
            block_hashes += self.cache.hash_blocks(
                ids,
                sequence.request.cache_root,
                block_hashes[-1] if block_hashes else None,
                media_of_blocks(media, self.cache.block_size)
                if media and start <= media[-1].positions[-1]
                else NO_EXTRAS,
                len(block_hashes),
            )
