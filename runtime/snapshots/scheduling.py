"""Scheduling of snapshots: decides when the states of recurrent layers are copied, so that their prefixes can be cache hits.

A recurrent layer keeps only its latest state. A snapshot is a copy of all states of a sequence at the end of a hashed block. It
also copies entries of attention layers that are not full there. It is stored in blocks of the pool, cached under the name of the
hashed block, and evicted like other blocks. A sequence that starts from a snapshot copies it again (`SequenceBlocks.reserve`).
Copies are executed before the step writes, so the snapshot is taken in the step that begins at the end of the block.

Snapshots are useful where later prompts may diverge from the text. Prompts are split at these positions:

- the end of the last block that a repeated prompt can reuse;
- the end of the prefix that a prompt shares with an earlier one, such as a system prompt.

Long prompts have more snapshots, at ends of chunks. An answer has one. It is replaced as the answer grows, and serves the next
message of the conversation. SGLang (MambaRadixCache) and vLLM (`--mamba-cache-mode align`) choose similar positions."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import chain

from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.feature import Claim, Feature, Scheduling
from runtime.kv.block_pool import BlockIds
from runtime.kv.prefix_cache import BlockHash
from runtime.sequence import Sequence

_EVERY_TOKENS = 2048  # of a long prompt: the least between two snapshots
_ANSWER_TOKENS = 64  # of an answer: so far its snapshot moves on, which costs a copy of the states
_MAX_SEEN = 1 << 16  # names of prompts' blocks that are remembered


@dataclass(slots=True, eq=False)
class _Snapshot:
    """Copy of the states before token `position`. `groups`: (index of a layer group, its copied blocks)."""

    prompt: _Prompt
    position: int
    groups: list[tuple[int, BlockIds]]

    @property
    def block_ids(self) -> BlockIds:
        return _joined(block_ids for _, block_ids in self.groups)


class SnapshotScheduling(Feature):
    def __init__(self) -> None:
        self._running: dict[int, _Prompt] = {}  # by number of the sequence
        self._taken: dict[int, _Snapshot] = {}  # by their first block, until the step that copies has settled
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()  # blocks of prompts, least recently seen first

    def connect(self, scheduler: Scheduling) -> None:
        self._blocks, self._cache = scheduler.blocks, scheduler.blocks.cache
        self.block_size = self._cache.block_size

    def claim(self, sequence: Sequence) -> Claim | None:
        return _Prompt(self, sequence) if sequence.chunk_work is None else None

    def starts(self, prompt: _Prompt) -> None:
        self._running[prompt.sequence.number] = prompt

    def stops(self, prompt: _Prompt) -> None:
        self._running.pop(prompt.sequence.number, None)

    def shared(self, names: Several[BlockHash]) -> int:
        """Return how many of the first blocks in `names` also began an earlier prompt. Remember all of `names`."""
        num = bisect_left(names, True, key=lambda name: name not in self._seen)
        for name in names:
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return num

    # --- a step ---------------------------------------------------------------------------------------------------

    def decided(self, rows: Several[ScheduledRow]) -> None:
        size = self.block_size
        for row in rows:
            if row.start % size or row.binding is not None:
                continue
            prompt = self._running.get(row.number)
            if prompt is not None and prompt.wants(row.start) and not prompt.lacks_drafts(row.start):
                self._take(prompt, row.start)

    def _take(self, prompt: _Prompt, position: int) -> None:
        """Copy the states that this step overwrites, if enough blocks are free and not reserved."""
        pool, size = self._blocks.pool, self._cache.entry_size
        parts: list[tuple[int, BlockIds]] = []
        for index, table in enumerate(prompt.sequence.tables):
            if table.group.kind.is_replaced:
                parts.append((index, table.ids))
            elif table.group.kind.grows and position % size:
                parts.append((index, table.entry_ids(position // size, position // size + 1)))
        sources = _joined(block_ids for _, block_ids in parts)
        if pool.num_free < len(sources):
            return
        targets = self._replaceable(prompt)
        if len(targets) == len(sources):
            pool.share(targets)
        else:
            targets = self._blocks.allocate(len(sources))
        for source, target in zip(sources, targets, strict=True):
            self._blocks.copies.add(source, target)
        groups, start = [], 0
        for index, block_ids in parts:
            groups.append((index, targets[start : start + len(block_ids)]))
            start += len(block_ids)
        self._taken[targets[0]] = _Snapshot(prompt, position, groups)
        prompt.last = position

    def _replaceable(self, prompt: _Prompt) -> BlockIds:
        """Return the blocks of the previous snapshot of the answer, which the next snapshot may overwrite; none if they are in
        use."""
        if prompt.moving is None:
            return array("i")
        name, groups = prompt.moving
        found = _joined(self._cache.entry(index, name) for index in groups)
        return found if self._blocks.pool.num_idle(found) == len(found) else array("i")

    def settled(self, batch: ScheduledBatch) -> None:
        for snapshot in self._of(batch):
            prompt, sequence = snapshot.prompt, snapshot.prompt.sequence
            if snapshot.position <= sequence.num_known_tokens:  # else it ended before
                self._blocks.extend_hashes(sequence)
                name = sequence.block_hashes[snapshot.position // self.block_size - 1]
                for index, block_ids in snapshot.groups:
                    self._cache.insert([name], index, block_ids)
                if snapshot.position >= prompt.end:
                    prompt.moving = name, [index for index, _ in snapshot.groups]
            self._blocks.pool.release(snapshot.block_ids, self._cache)

    def forget(self, batch: ScheduledBatch) -> None:
        for snapshot in self._of(batch):
            self._blocks.pool.release(snapshot.block_ids, self._cache)

    def _of(self, batch: ScheduledBatch) -> list[_Snapshot]:
        taken = self._taken
        return [taken.pop(copy.target) for copy in batch.copies if copy.target in taken]

    def clear(self) -> None:
        self._seen.clear()

    @property
    def block_ids(self) -> Iterator[int]:
        """Ids of the blocks to which snapshots hold references. An id appears once for each reference."""
        for snapshot in self._taken.values():
            yield from snapshot.block_ids


def _joined(parts: Iterable[Several[int]]) -> BlockIds:
    return array("i", chain.from_iterable(parts))


class _Prompt(Claim):
    """Snapshot positions of one sequence. `end`: number of known tokens when it started. `last`: position of its last snapshot,
    or where it started. `moving`: name and layer groups of the snapshot of its answer."""

    __slots__ = ("_cuts", "_feature", "end", "last", "moving", "sequence")

    def __init__(self, feature: SnapshotScheduling, sequence: Sequence) -> None:
        self._feature = feature
        self._cuts: tuple[int, ...] = ()
        self.sequence = sequence
        self.end = self.last = 0
        self.moving: tuple[BlockHash, list[int]] | None = None

    def started(self) -> None:
        sequence, size = self.sequence, self._feature.block_size
        num = min(sequence.num_reusable // size, len(sequence.block_hashes))
        shared = self._feature.shared(sequence.block_hashes[:num])
        self._cuts = shared * size, num * size
        self.end, self.last = sequence.num_tokens, sequence.num_computed_tokens
        self._feature.starts(self)

    def reach(self, num_tokens: int, room: int) -> int:
        """Return the number of tokens to compute in this step: fewer than `num_tokens` if a snapshot must be taken before their
        end."""
        start, size = self.sequence.num_computed_tokens, self._feature.block_size
        end = start + num_tokens
        for cut in self._cuts:
            if start < cut < end:
                return cut - start
        aligned = end // size * size
        if end < self.sequence.num_tokens and aligned > start and aligned - self.last >= _EVERY_TOKENS:
            return aligned - start
        return num_tokens

    def wants(self, position: int) -> bool:
        if position <= self.last:
            return False
        least = _ANSWER_TOKENS if position >= self.end else _EVERY_TOKENS
        return position in self._cuts or position - self.last >= least

    def lacks_drafts(self, position: int) -> bool:
        """Return whether draft layers have not computed all tokens before `position`."""
        return 0 <= self.sequence.first_unfollowed < position

    def suspended(self) -> None:
        self._feature.stops(self)
