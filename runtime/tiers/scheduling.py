"""Scheduling of KV tiers: copies blocks from the prefix cache to the tiers, and back for waiting sequences.

To the tiers: when a sequence releases its blocks, the full blocks of known tokens are queued. They are copied to the host if the
prefix cache still has them then, and from the host to the disk. From the tiers: if a tier has more of a waiting sequence's prefix,
blocks are allocated and filled. Then they are inserted in the prefix cache, and the sequence starts with an ordinary hit. Other
sequences can start meanwhile.

Copies run in parallel with steps. A copy begins only when all steps scheduled before it was planned have completed, because they
may still use its blocks. During a copy, its blocks have an extra reference."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime.api import Metric
from runtime.batch import ScheduledBatch
from runtime.fault import Fault
from runtime.feature import Claim, Door, Feature, Scheduling
from runtime.sequence import Sequence
from runtime.tiers.host import HostMemory, HostTier, Key, Slots
from runtime.tiers.lookup import TierLookup
from runtime.tiers.stats import FROM_DISK, FROM_HOST, TO_DISK, TO_HOST, TierStats

if TYPE_CHECKING:
    from runtime.kv.sequence_blocks import SequenceBlocks
    from runtime.tiers.disk import DiskTier

log = logging.getLogger("oneloop.engine")

_HELD_SHARE = 4  # a copy down holds at most this part of all blocks, and writes to disk of all slots
_MAX_LOOKUPS = 16  # of a step: hundreds may wait
_MAX_TRIES = 3  # fetches of a sequence until it starts: others may have evicted what came up


@dataclass(slots=True, eq=False)
class _Fetch:
    """Entries being copied to the device for sequence `number`; they save computing `num_tokens` tokens. `found`: blocks to fill
    for each entry. `kept`: cached blocks before them, which must not be evicted. `begins_after`: number of the step that must
    complete first."""

    number: int
    num_tokens: int
    found: dict[Key, Several[int]]
    kept: Several[Several[int]]
    begins_after: int
    from_disk: set[Key] = field(default_factory=set)
    left: deque[Key] = field(default_factory=deque)  # entries in the host's memory that are held, and not copied yet
    filled: list[Key] = field(default_factory=list)
    is_over: bool = False  # the model has left the device, and its blocks were given back


class TierScheduling(Feature):
    def __init__(
        self, host: HostTier, slabs: HostMemory, token_s: float, disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic, copy_bytes: int = 64 << 20,
    ) -> None:  # fmt: skip
        """Create the tiers. `token_s`: measured time to compute one token of a prompt, in seconds. `copy_bytes`: maximum size of
        one copy, which limits the staging memory and the time until other copies can run."""
        self._copy_bytes = copy_bytes
        self.host, self.slabs, self.disk = host, slabs, disk
        self.stats = TierStats()
        self.lookup = TierLookup(host, disk, slabs.slot_bytes, token_s, self.stats)
        self._clock = clock
        self._door: Door | None = None
        self._num_scheduled = 0
        self._under_way: set[int] = set()  # numbers of steps that have not settled
        self._num_lookups = 0
        self._no_room: tuple[int, int] | None = None  # sequence for whose fetch there was no room, and `num_freed` then
        self._fetches: dict[int, _Fetch] = {}  # by number of the sequence
        self._new: deque[_Fetch] = deque()
        # Entries to copy down: the last step that may write the entry, and whether the entry goes on to the disk.
        self._to_keep: OrderedDict[Key, tuple[int, bool]] = OrderedDict()
        self._saving: list[tuple[Key, Slots, list[int], bool]] = []
        self._num_writing = 0
        self._threads: list[ThreadPoolExecutor] = []

    def connect(self, scheduler: Scheduling) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.blocks.cache

    @property
    def _blocks(self) -> SequenceBlocks:
        return self._scheduler.blocks

    def claim(self, sequence: Sequence) -> Claim:
        return _Prefix(self, sequence)

    # --- up: decided ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._num_lookups = 0

    def is_fetching(self, sequence: Sequence) -> bool:
        return sequence.number in self._fetches

    def fetched(self, sequence: Sequence, num_tries: int) -> bool | None:
        """Return True if nothing more of the sequence's prefix is worth fetching from the tiers. Return False while entries are
        being fetched or the lookup is postponed, and None if there are too few free blocks. `num_tries`: fetches so far."""
        if self.is_fetching(sequence):
            return False
        if num_tries >= _MAX_TRIES:
            return True
        if (sequence.number, self._blocks.pool.num_freed) == self._no_room:
            return None
        if self._num_lookups >= _MAX_LOOKUPS:
            return False
        self._num_lookups += 1
        return self._look_up(sequence)

    def _look_up(self, sequence: Sequence) -> bool | None:
        self._blocks.extend_hashes(sequence)
        names, num_reusable = sequence.block_hashes, sequence.num_reusable // self._cache.block_size
        match = self._cache.match(names, num_reusable)
        self.stats.num_queries += max(0, num_reusable - match.num_entries) * self._cache.block_size
        most = min(num_reusable, len(names))
        num_tokens, missing = self.lookup.worth_reading(self._cache, names, match.num_entries, most)
        if not missing:
            return True
        num = sum(self._cache.groups[group].width for group, _ in missing)
        idle = sum(map(self._blocks.pool.num_idle, match.ids))
        spare = self._blocks.blocks_per_entry * len(self._scheduler.running)
        if self._blocks.pool.num_free - num - spare < idle:
            self._no_room = sequence.number, self._blocks.pool.num_freed
            return None
        for block_ids in match.ids:
            self._blocks.pool.share(block_ids)
        block_ids, start = self._blocks.allocate(num), 0
        found: dict[Key, Several[int]] = {}
        for key in missing:
            end = start + self._cache.groups[key[0]].width
            found[key] = block_ids[start:end]
            start = end
        fetch = _Fetch(sequence.number, num_tokens, found, [*match.ids], self._num_scheduled)
        self._fetches[sequence.number] = fetch
        self._new.append(fetch)
        self._go_on()
        return False

    # --- up: done -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if fetches are waiting for the first call of `launches`, which supplies the interface to the engine."""
        return bool(self._new) and self._door is None

    def complete(self, batch: ScheduledBatch) -> ScheduledBatch:
        self._num_scheduled += 1
        self._under_way.add(self._num_scheduled)
        return replace(batch, number=self._num_scheduled)

    def launches(self, batch: ScheduledBatch, door: Door) -> None:
        self._door = door
        self._go_on()

    def settled(self, batch: ScheduledBatch) -> None:
        self._under_way.discard(batch.number)
        self._go_on()

    def forget(self, batch: ScheduledBatch) -> None:
        """Discard the queue of blocks to copy. Called when `batch` failed, because it may not have written them."""
        self._to_keep.clear()
        self.settled(batch)

    def _go_on(self) -> None:
        if self._door is None:
            return
        if not self._saving:
            self._save()
        while self._new and self._has_settled(self._new[0].begins_after):
            self._read_disk(self._new.popleft())

    def _has_settled(self, number: int) -> bool:
        return all(each > number for each in self._under_way)

    def _read_disk(self, fetch: _Fetch) -> None:
        """Read entries that are only on disk into host memory, then call `_copy_up`."""
        wanted: dict[Key, Slots] = {}
        for key in fetch.found:
            if key in self.host:
                self.host.hold(key)
                fetch.left.append(key)
            elif (slots := self.host.take(self._cache.groups[key[0]].width)) is not None:
                wanted[key] = slots
        if self.disk is None or not wanted:
            for slots in wanted.values():  # evicted from the host since they were looked up
                self.host.give_back(slots)
            self._copy_up(fetch)
            return
        disk, slabs, began_s = self.disk, self.slabs, self._clock()

        def read() -> list[bool]:
            return [disk.read(key, slabs.views(slots)) for key, slots in wanted.items()]

        def done(ended: asyncio.Future[list[bool]]) -> None:
            error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
            if isinstance(error, Exception):
                log.error("the KV disk tier failed to read", exc_info=error)
            num_bytes, results = 0, [False] * len(wanted) if error is not None else ended.result()
            for (key, slots), is_read in zip(wanted.items(), results, strict=True):
                if not is_read:
                    self.host.give_back(slots)
                    continue
                num_bytes += len(slots) * slabs.slot_bytes
                self.host.put(key, slots)
                self.host.hold(key)
                fetch.left.append(key)
                fetch.from_disk.add(key)
            if num_bytes:
                self.stats.moved(FROM_DISK, num_bytes, began_s, self._clock())
            self._copy_up(fetch)

        self._beside(0, read, done)

    def _copy_up(self, fetch: _Fetch) -> None:
        """Copy the next entries from host memory to the device. When all are copied, insert them in the prefix cache."""
        if fetch.is_over:
            self._release(fetch)
            return
        keys = self._next(fetch.left, lambda key: len(fetch.found[key]))
        if not keys or self._door is None:
            self._arrived(fetch)
            return
        block_ids = [block_id for key in keys for block_id in fetch.found[key]]
        slots = [slot for key in keys for slot in self.host.hold(key)]
        for key in keys:
            self.host.release(key)  # the hold of `_read_disk` stays until the copy has ended
        began_s = self._clock()

        def done(ended: asyncio.Future[Any]) -> None:
            for key in keys:
                self.host.release(key)
            if self._failed(ended, "from the host"):
                self._release(fetch)
            elif not fetch.is_over:
                fetch.filled += keys
                self.stats.moved(FROM_HOST, len(slots) * self.slabs.slot_bytes, began_s, self._clock())
            self._copy_up(fetch)

        moved = self._door.runner.move_blocks(block_ids, lambda: self.slabs.rows(slots), to_host=False)
        moved.add_done_callback(done)

    def _arrived(self, fetch: _Fetch) -> None:
        self._fetches.pop(fetch.number, None)
        for group, name in fetch.filled:
            self._cache.insert([name], group, fetch.found[group, name])
        num_from_disk = sum(key in fetch.from_disk for key in fetch.filled)
        for tier, num in (("disk", num_from_disk), ("host", len(fetch.filled) - num_from_disk)):
            if num:
                self.stats.hits[tier] += fetch.num_tokens * num // len(fetch.found)
        for block_ids in (*fetch.found.values(), *fetch.kept):
            self._blocks.pool.release(block_ids, self._cache)
        if self._door is not None:
            self._door.wake()

    def _release(self, fetch: _Fetch) -> None:
        for key in fetch.left:
            self.host.release(key)
        fetch.left.clear()

    # --- down -----------------------------------------------------------------------------------------------------

    def keep(self, sequence: Sequence) -> None:
        """Queue the full blocks of `sequence` for a copy to the tiers. Called before the sequence releases them."""
        request = sequence.request
        end = sequence.num_registered_blocks
        if sequence.first_unfollowed >= 0:  # the drafts' layers lack what comes behind
            end = min(end, sequence.first_unfollowed // self._cache.block_size)
        on_disk = self.disk is not None and request.adapter is None  # adapters are numbered by each process
        for group, table in enumerate(sequence.tables):
            cached = self._cache.named(group)
            first = table.first_entry * self._cache.entry_blocks(table.group)
            for name in sequence.block_hashes[first:end]:
                key = group, name
                if name not in cached:
                    continue
                if key in self.host:
                    self.host.hold(key)  # the most recently used
                    self.host.release(key)
                elif not (self.disk is not None and key in self.disk):
                    self._to_keep[key] = self._num_scheduled, on_disk
        self._go_on()

    def _save(self) -> None:
        """Copy the next queued entries to the host, if the prefix cache still has them and no step in flight can write them."""
        assert self._door is not None
        most = max(1, min(self._blocks.pool.num_blocks // _HELD_SHARE, self._copy_bytes // self.slabs.slot_bytes))
        num, saving = 0, self._saving
        while self._to_keep and num < most:
            key, (step, on_disk) = next(iter(self._to_keep.items()))
            if not self._has_settled(step):
                break
            block_ids = self._cache.entry(*key)
            if block_ids and self._blocks.pool.num_idle(block_ids) > self._blocks.pool.num_free:
                break  # those that run have been promised all
            del self._to_keep[key]
            if not block_ids:
                self.stats.num_lost += 1
            elif key not in self.host and (slots := self.host.take(len(block_ids))) is not None:
                self._blocks.pool.share(block_ids)
                saving.append((key, slots, block_ids, on_disk))
                num += len(block_ids)
        if not saving:
            return
        all_ids = [block_id for _, _, block_ids, _ in saving for block_id in block_ids]
        all_slots = [slot for _, slots, _, _ in saving for slot in slots]
        moved = self._door.runner.move_blocks(all_ids, lambda: self.slabs.rows(all_slots), to_host=True)
        moved.add_done_callback(partial(self._saved, self._clock(), saving))

    def _saved(
        self, began_s: float, saving: list[tuple[Key, Slots, list[int], bool]], ended: asyncio.Future[Any]
    ) -> None:
        is_current = saving is self._saving
        if is_current:
            self._saving = []
            for _, _, block_ids, _ in saving:
                self._blocks.pool.release(block_ids, self._cache)
        has_failed = self._failed(ended, "to the host")
        for key, slots, _, on_disk in saving:
            if has_failed or not is_current:
                self.host.give_back(slots)
            else:
                self.host.put(key, slots)
                if on_disk:
                    self._write(key)
        if not has_failed:
            num_slots = sum(len(slots) for _, slots, _, _ in saving)
            self.stats.moved(TO_HOST, num_slots * self.slabs.slot_bytes, began_s, self._clock())
        self._go_on()
        if self._door is not None and (self._scheduler.waiting or self._scheduler.running):
            self._door.wake()

    def _write(self, key: Key) -> None:
        assert self.disk is not None
        width = self._cache.groups[key[0]].width
        if key not in self.host or (self._num_writing + width) * _HELD_SHARE > self.host.num_slots:
            self.stats.num_lost += 1  # the disk is slower than what comes down
            return
        slots, disk, began_s = self.host.hold(key), self.disk, self._clock()
        self._num_writing += width

        def done(ended: asyncio.Future[bool]) -> None:
            self._num_writing -= width
            self.host.release(key)
            if ended.cancelled():
                return
            if (error := ended.exception()) is not None:
                log.error("the KV disk tier failed to write", exc_info=error)
            elif ended.result():
                self.stats.moved(TO_DISK, width * self.slabs.slot_bytes, began_s, self._clock())

        self._beside(1, lambda: disk.write(key, self.slabs.views(slots)), done)

    # --- both -----------------------------------------------------------------------------------------------------

    def _next(self, left: deque[Key], num_blocks: Callable[[Key], int]) -> list[Key]:
        most, keys, num = max(1, self._copy_bytes // self.slabs.slot_bytes), [], 0
        while left and num < most:
            keys.append(left.popleft())
            num += num_blocks(keys[-1])
        return keys

    def _beside(self, number: int, work: Callable[[], Any], done: Callable[[asyncio.Future[Any]], None]) -> None:
        """Run `work` on one of two threads and call `done` on the event loop. `number`: 0 for disk reads, 1 for disk writes."""
        if not self._threads:
            self._threads = [ThreadPoolExecutor(1, f"oneloop-kv-{name}") for name in ("read", "write")]
        asyncio.get_running_loop().run_in_executor(self._threads[number], work).add_done_callback(done)

    def _failed(self, ended: asyncio.Future[Any], where: str) -> bool:
        error: BaseException | None = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        if error is None:
            return False
        if self._door is None:  # closed
            return True
        if self._door.runner.fault(error) is Fault.LOST:
            self._door.lose(error)
        else:
            log.warning("KV blocks could not be copied %s; their tokens are recomputed", where, exc_info=error)
        return True

    def clear(self) -> None:
        """Release all blocks and forget all entries. Called when the model is unloaded, since it may return with other weights."""
        self._give_back()
        self.host.clear()
        if self.disk is not None:
            log.info("--kv-disk is disabled until the next start, because the model was unloaded")
            self.disk = self.lookup.disk = None

    def _give_back(self) -> None:
        """Cancel all copies and release their blocks. The results of copies in flight are ignored."""
        for fetch in self._fetches.values():
            fetch.is_over = True
            for block_ids in (*fetch.found.values(), *fetch.kept):
                self._blocks.pool.release(block_ids, self._cache)
        for _, _, block_ids, _ in self._saving:
            self._blocks.pool.release(block_ids, self._cache)
        self._fetches.clear()
        self._new.clear()
        self._to_keep.clear()
        self._saving = []

    def close(self) -> None:
        self._give_back()
        self._door = None
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    @property
    def block_ids(self) -> Iterator[int]:
        """Ids of the blocks to which copies hold references. An id appears once for each reference."""
        for fetch in self._fetches.values():
            for block_ids in (*fetch.found.values(), *fetch.kept):
                yield from block_ids
        for _, _, block_ids, _ in self._saving:
            yield from block_ids

    def metrics(self) -> list[Metric]:
        used = {"host": self.host.num_used * self.slabs.slot_bytes}
        if self.disk is not None:
            used["disk"] = self.disk.num_bytes
        return self.stats.metrics(used, len(self._fetches), 0 if self.disk is None else self.disk.num_errors)


class _Prefix(Claim):
    """Claim of one sequence on the KV tiers. `_is_ready`: True once nothing more of its prefix needs to be fetched."""

    __slots__ = ("_feature", "_is_ready", "_num_tries", "_sequence")

    def __init__(self, feature: TierScheduling, sequence: Sequence) -> None:
        self._feature = feature
        self._sequence = sequence
        self._is_ready = False
        self._num_tries = 0

    def may_start(self) -> bool:
        if self._is_ready:
            return True
        was_fetching = self._feature.is_fetching(self._sequence)
        found = self._feature.fetched(self._sequence, self._num_tries)
        self._is_ready = found is True
        self._num_tries += not was_fetching and self._feature.is_fetching(self._sequence)
        return found is not False

    def suspended(self) -> None:
        self._feature.keep(self._sequence)
        self._is_ready, self._num_tries = False, 0
