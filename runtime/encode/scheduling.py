"""Scheduling of encoders: decides which items are encoded before a prompt chunk, and how long a chunk can be.

A chunk may end between media items or within one. It needs the outputs of all items that it reaches, and ends before an item whose
outputs are missing. Missing outputs are encoded in parallel with steps, and later chunks are computed when they are ready. A
sequence protects items from eviction which its chunks have begun and not finished, and the next item, which only needs to be
encoded. Two sequences therefore cannot deadlock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from runtime.api import FinishReason, Metric, Request
from runtime.api.media import BESIDE_PICTURES, EMBEDS, MediaItem
from runtime.batch import EncoderWork, MediaSpan, RowMedia, ScheduledBatch, ScheduledRow
from runtime.encode.cache import EncoderCache, Holder
from runtime.encode.stats import EncoderStats
from runtime.fault import STEP_ERROR, RowFailed
from runtime.feature import Claim, Door, Feature, Scheduling
from runtime.sequence import Sequence

if TYPE_CHECKING:
    from runtime.api.media import Int32s

RopePositions: TypeAlias = "Callable[[Several[MediaItem], int], Int32s]"


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Limits and properties of encoder work.

    - `max_num_encoder_tokens`: number of outputs that a step may begin to encode; a single larger item is allowed
    - `cache_size`: number of outputs in the cache; `max_model_len`: longest context in tokens
    - `whole_items`, `whole_prompts`: items, or prompts, are never split over steps, because their tokens attend to each other
    - `width`: size of an output vector; `rope_positions`: computes M-RoPE positions, if the model has them
    - `apart`: audio is encoded differently if the prompt has images
    - `num_outputs`: outputs of each item, if layers read them by cross-attention; 0 if an item has one output per prompt token"""

    max_num_encoder_tokens: int
    cache_size: int
    max_model_len: int
    whole_items: bool = False
    width: int = 0
    rope_positions: RopePositions | None = None
    whole_prompts: bool = False
    apart: bool = False
    num_outputs: int = 0

    def size(self, item: MediaItem) -> int:
        """Return the number of an item's outputs."""
        return self.num_outputs or len(item.positions)


class EncoderScheduling(Feature):
    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self.cache = EncoderCache(limits.cache_size)
        self._work: list[EncoderWork] = []
        self._pending: dict[bytes, EncoderWork] = {}  # cached keys whose outputs are not ready
        self._finished: list[tuple[bytes, Holder]] = []  # items that sequences need in the step, but not later
        self._left = limits.max_num_encoder_tokens  # budget left in the step being scheduled
        self.stats = EncoderStats()

    def connect(self, scheduler: Scheduling) -> None:
        self._max_num_batched_tokens = scheduler.limits.max_num_batched_tokens

    def claim(self, sequence: Sequence) -> Claim | None:
        if not sequence.request.media and not self.limits.whole_prompts:
            return None
        self.admit(sequence)
        return _ReadItem(self, sequence) if self.limits.num_outputs else _Items(self, sequence)

    def check(self, request: Request) -> None:
        """Raise ValueError, with a message for users, if a media item of `request` exceeds a limit or does not match its grid."""
        if not request.media:
            return
        max_num_batched_tokens = self._max_num_batched_tokens
        for item in request.media:
            num = self.limits.size(item)
            embeds = item.inputs.get(EMBEDS)
            if embeds is not None and embeds.shape != (num, self.limits.width):
                raise ValueError(
                    f"embeddings {list(embeds.shape)} for {num} tokens: those of this model are {[num, self.limits.width]}"
                )
            if num > self.cache.capacity:
                raise ValueError(
                    f"the {item.modality} has {num} tokens, more than --encoder-cache-size {self.cache.capacity}"
                )
            span = int(item.positions[-1] - item.positions[0]) + 1
            if self.limits.whole_items and span >= max_num_batched_tokens:
                raise ValueError(
                    f"the {item.modality} has {span} tokens, and a step holds {max_num_batched_tokens} (--max-num-batched-tokens)"
                )

        if self.limits.apart:
            beside = {BESIDE_PICTURES in item.inputs for item in request.media if item.modality == "audio"}
            if beside and beside != {any(item.modality == "image" for item in request.media)}:
                raise ValueError(
                    "this model encodes audio differently when images are present; call `beside_pictures` first"
                )
        num_outputs = sum(len(item.positions) for item in {item.digest: item for item in request.media}.values())
        if self.limits.whole_prompts and num_outputs > self.cache.capacity:
            raise ValueError(
                f"the prompt's items have {num_outputs} tokens, more than --encoder-cache-size {self.cache.capacity}"
            )
        if self.limits.rope_positions is not None:
            num = len(request.prompt_ids)
            furthest = int(self.limits.rope_positions(request.media, num).max()) + 1
            if furthest > num and furthest >= self.limits.max_model_len:
                raise ValueError(
                    f"the video extends to position {furthest}, beyond the context of {self.limits.max_model_len}"
                )

    def admit(self, sequence: Sequence) -> None:
        """Compute the M-RoPE positions of a new sequence, if its prompt has media."""
        media, locate = sequence.request.media, self.limits.rope_positions
        if media and locate is not None:
            sequence.rope_positions = locate(media, sequence.num_prompt_tokens + 1)
            longest = self.limits.max_model_len - max(0, sequence.rope_delta)
            sequence.max_tokens_total = min(sequence.max_tokens_total, longest)

    def reach(self, sequence: Sequence, num_tokens: int, most: int) -> int:
        """Return how many of the next `num_tokens` tokens a step may compute. It is less if outputs of an item are missing, and
        more, up to `most`, if an item must not be split."""
        if self.limits.whole_prompts:
            return self._reach_whole(sequence, num_tokens, most)
        start = sequence.num_computed_tokens
        end = start + num_tokens
        for item in sequence.request.media:
            first, last = int(item.positions[0]), int(item.positions[-1])
            if last < start:
                continue
            if first >= end:
                break
            begins = int(item.positions[np.searchsorted(item.positions, start)])
            if begins >= end:
                continue
            if self.limits.whole_items and last >= end:
                if last + 1 - start > most:
                    end = begins
                    continue
                end = last + 1
            if not self.provide(item, sequence):
                end = begins  # positions of this item may be interleaved with those of another
        return end - start

    def _reach_whole(self, sequence: Sequence, num_tokens: int, most: int) -> int:
        """Return the number of tokens for a prompt that must be computed in one step, after all its items are encoded; 0 until
        then. A sequence that cannot protect all its items protects none, so that two sequences cannot block each other."""
        missing = sequence.num_prompt_tokens - sequence.num_computed_tokens
        if missing > most:
            return 0
        provided = [self.provide(item, sequence) for item in sequence.request.media if missing > 0]
        if not all(provided):
            if any(key_of(item, sequence.request.cache_salt) not in self.cache for item in sequence.request.media):
                self.release(sequence)
            return 0
        return max(num_tokens, missing)

    def provide(self, item: MediaItem, sequence: Sequence) -> bool:
        """Protect the outputs of `item` from eviction, and schedule their encoding if they are missing. Return whether they are
        ready."""
        key, num, holder = key_of(item, sequence.request.cache_salt), self.limits.size(item), _holder(sequence, item)
        if key in self.cache:
            if not self.cache.is_held_by(key, holder):
                self.stats.num_queries += 1
                self.stats.num_hits += 1
        elif (self._work and num > self._left) or not self.cache.add(key, num):
            return False
        else:
            work = self._pending[key] = EncoderWork(sequence.number, key, item)
            self._work.append(work)
            self._left -= num
            self.stats.num_queries += 1
        self.cache.hold(key, holder)
        return key not in self._pending

    def encoded(self, work: EncoderWork) -> bool:
        """Record that the outputs of `work` are ready. Return False if no sequence needs them any more."""
        if self._pending.get(work.key) is not work:
            return False
        del self._pending[work.key]
        return True

    def failed(self, work: EncoderWork) -> bool:
        """Record that `work` failed, so that other sequences with the same item try again. Return False if no sequence needs it any
        more."""
        if not self.encoded(work):
            return False
        self.cache.forget(work.key)
        return True

    @property
    def slows_steps(self) -> bool:
        return bool(self._pending)

    def of_row(self, sequence: Sequence, start: int, end: int) -> RowMedia | None:
        """Return the media of a row that computes prompt tokens [start, end); None without media. After the step, the sequence
        protects only items that it has begun."""
        if start >= sequence.num_prompt_tokens:
            return None
        spans = []
        for item in sequence.request.media:
            first, stop = (int(each) for each in np.searchsorted(item.positions, (start, end)))
            if first < stop:
                key = key_of(item, sequence.request.cache_salt)
                spans.append(MediaSpan(key, first, item.positions[first:stop]))
                if stop == len(item.positions):
                    self._finished.append((key, _holder(sequence, item)))
        positions = sequence.rope_positions
        if positions is not None and end > positions.shape[1]:
            behind = np.arange(positions.shape[1], end, dtype=np.int32) + sequence.rope_delta
            positions = np.concatenate([positions, np.broadcast_to(behind, (3, len(behind)))], axis=1)
        prompt_len = sequence.num_prompt_tokens if self.limits.whole_prompts else 0
        return RowMedia(tuple(spans), None if positions is None else positions[:, start:end], prompt_len)

    def read(self, sequence: Sequence) -> RowMedia:
        """Return the media of a row that reads the sequence's only item by cross-attention. The item's protection ends after the
        step."""
        (item,) = sequence.request.media
        key = key_of(item, sequence.request.cache_salt)
        self._finished.append((key, _holder(sequence, item)))
        return RowMedia((), crossed=key)

    def release(self, sequence: Sequence) -> None:
        """End the protection of all items of a sequence. Called when it has ended or is preempted."""
        for item in sequence.request.media:
            self.cache.release(key_of(item, sequence.request.cache_salt), _holder(sequence, item))

    @property
    def has_work(self) -> bool:
        return bool(self._work)

    def complete(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return `batch` with the items to encode, and with the outputs to evict before. Reset the budget for the next step."""
        for key, holder in self._finished:
            self.cache.release(key, holder)
        self._finished.clear()
        dropped = self.cache.take_dropped()
        for key in dropped:
            if key not in self.cache:  # it was for sequences that were preempted or have ended
                self._pending.pop(key, None)
        work = tuple(each for each in self._work if self._pending.get(each.key) is each)
        self._work.clear()
        self._left = self.limits.max_num_encoder_tokens
        return replace(batch, encoder_work=work, encoder_drops=dropped) if work or dropped else batch

    def launches(self, batch: ScheduledBatch, door: Door) -> None:
        if not (batch.encoder_work or batch.encoder_drops):
            return
        began_s = time.monotonic()
        for work, done in zip(batch.encoder_work, door.runner.encode(batch), strict=True):
            done.add_done_callback(partial(self._done, work, began_s, door))

    def _done(self, work: EncoderWork, began_s: float, door: Door, done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is None:
            door.observe(self.stats.encoded, work, time.monotonic() - began_s)
            self.encoded(work)
        elif not isinstance(error, RowFailed):
            door.lose(error)
        elif self.failed(work):
            door.observe(self.stats.failed, work)
            door.end(work.number, FinishReason.ERROR, STEP_ERROR)
        door.wake()

    def clear(self) -> None:
        """Forget all outputs. Called when the device has lost them."""
        self.cache.clear()
        self._pending.clear()

    def metrics(self) -> list[Metric]:
        return self.stats.metrics(self.cache)


class _Items(Claim):
    __slots__ = ("_feature", "_sequence")

    def __init__(self, feature: EncoderScheduling, sequence: Sequence) -> None:
        self._feature = feature
        self._sequence = sequence

    def reach(self, num_tokens: int, room: int) -> int:
        if self._sequence.num_computed_tokens >= self._sequence.num_prompt_tokens:
            return num_tokens
        return self._feature.reach(self._sequence, num_tokens, room)

    def scheduled(self, row: ScheduledRow) -> ScheduledRow:
        media = self._feature.of_row(self._sequence, row.start, row.end)
        return row if media is None else row._replace(media=media)

    def suspended(self) -> None:
        self._feature.release(self._sequence)


class _ReadItem(Claim):
    """Claim of a sequence whose layers read one item by cross-attention. The sequence's first step stores the item's keys and
    values."""

    __slots__ = ("_feature", "_is_read", "_sequence")

    def __init__(self, feature: EncoderScheduling, sequence: Sequence) -> None:
        self._feature = feature
        self._sequence = sequence
        self._is_read = False

    def reach(self, num_tokens: int, room: int) -> int:
        if self._is_read or self._feature.provide(self._sequence.request.media[0], self._sequence):
            return num_tokens
        return 0

    def scheduled(self, row: ScheduledRow) -> ScheduledRow:
        if self._is_read:
            return row
        self._is_read = True
        return row._replace(media=self._feature.read(self._sequence))

    def suspended(self) -> None:
        self._is_read = False
        self._feature.release(self._sequence)


def key_of(item: MediaItem, cache_salt: str | None) -> bytes:
    """Return the cache key of an item: its content hash, combined with the cache salt."""
    return item.digest if cache_salt is None else sha256(item.digest + cache_salt.encode()).digest()


def _holder(sequence: Sequence, item: MediaItem) -> Holder:
    return sequence.number, int(item.positions[0])
