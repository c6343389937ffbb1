"""MaskMaker: runs the grammar matchers of constrained sequences and computes the token masks of their next samples.

Matchers run on their own threads, never on the event loop, and in parallel if the grammar library releases the GIL. A mask that
takes longer than its forward pass is late; only its own sequence waits for it. If it takes longer than LIMIT_S, the sequence ends.

Sampled tokens are recorded when their step has completed, and passed to the matchers when the next mask is needed. A preempted
sequence therefore loses nothing. Draft tokens are passed as well, to compute the mask after each of them, and rolled back. This
module is independent of grammars and steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from runtime.api import ConstraintError, FinishReason, ModelInfo, TokenMatcher
from runtime.batch import ScheduledRow
from runtime.constrain.masks import allows, mask_of, mask_of_set, num_words, only_token
from runtime.sequence import Forced, Sequence
from runtime.step import GpuEvent, MaskWords, RowMasks

LIMIT_S = 1.0  # per mask; a usual one takes ten microseconds and a slow one ten milliseconds
GRACE_S = 0.002  # minimum time before a mask is late: a thread that wakes up late should not cause a second sampling
MASKS_PER_THREAD = 8  # fewer masks are done before a second thread has woken
USUAL_THREADS = max(2, min(8, os.cpu_count() or 1))
MAX_FORCED = 16  # maximum number of forced tokens to look ahead
MAX_THREADS = 32  # including threads blocked by slow masks


@dataclass(frozen=True, slots=True)
class Ended:
    """End of sequence `number`: its grammar is complete (STOP), its constraints cannot be met (INVALID), or a matcher failed
    (ERROR)."""

    number: int
    finish: FinishReason
    error: str | None = None


class MaskMaker:
    def __init__(self, model: ModelInfo, late_one_made: Callable[[], None], *, looks_ahead: bool = False) -> None:
        """Create a mask maker for `model`. `late_one_made`: called on the event loop when late masks are ready, at least once after
        the last one. `looks_ahead`: store tokens that a grammar forces in `Sequence.forced`."""
        self._looks_ahead = looks_ahead
        self._num_words = num_words(model.vocab_size)
        self._eos_token_ids = model.eos_token_ids
        self._late_one_made = late_one_made
        self._sequences: dict[int, _Constraint] = {}  # by sequence number
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="oneloop-masks")

    def add(self, sequence: Sequence) -> None:
        if sequence.has_matchers:
            self._sequences[sequence.number] = _Constraint(
                sequence, self._num_words, self._eos_token_ids, looks_ahead=self._looks_ahead
            )

    def note(self, number: int, token_ids: Several[int]) -> None:
        """Record the new token ids of sequence `number`. Called when a step that sampled them has completed."""
        constraint = self._sequences.get(number)
        if constraint is not None:
            constraint.fresh_ids.extend(token_ids)

    def forget(self, sequence: Sequence) -> None:
        constraint = self._sequences.pop(sequence.number, None) if sequence.has_matchers else None
        if constraint is not None and constraint.mask is not None:
            constraint.mask.give_up("it has ended")

    async def make(self, rows: Several[ScheduledRow], computed: Callable[[], GpuEvent]) -> None:
        """Compute masks for the next samples of `rows`, whose earlier samples are recorded. Return when all masks are ready, or
        when the forward pass has completed (`computed`). Masks that are late then continue on their threads."""
        queue = deque(mask for row in rows if (mask := self._wanted(row)) is not None)
        masks = tuple(queue)
        jobs = [self._run(queue) for _ in range(min(USUAL_THREADS, -(-len(queue) // MASKS_PER_THREAD)))]
        if jobs:
            await asyncio.wait(jobs, timeout=GRACE_S)
        if queue:  # the rest waits behind a slow mask
            jobs += [self._run(deque([mask])) for mask in _emptied(queue)]
            await asyncio.wait(jobs, timeout=GRACE_S)
        under_way = [job for job in jobs if not job.done()]
        if under_way:
            await _either(_passed(computed()), asyncio.wait(under_way))
        for job in under_way:
            job.add_done_callback(lambda _: self._late_one_made())
        for mask in masks:
            self._watch(mask)

    def has_mask(self, number: int) -> bool:
        """Return whether the mask of sequence `number` is ready. True also if the sequence has ended, because its samples are
        discarded."""
        constraint = self._sequences.get(number)
        return constraint is None or (constraint.mask is not None and constraint.mask.made is not None)

    def take(self, rows: Several[ScheduledRow]) -> tuple[RowMasks, list[Ended]]:
        """Return (masks of `rows`, sequences that end). All masks must be ready. The mask of a sequence that ends allows all
        tokens."""
        words: list[MaskWords] = []
        owners: list[int] = []
        ended: list[Ended] = []
        for row in rows:
            constraint = self._sequences.get(row.number)
            if constraint is None:
                masks = self._all()
            else:
                mask = constraint.take()
                masks = mask.behind(row.draft_ids)
                constraint.sequence.forced = mask.forced
                if mask.end is not None:
                    ended.append(mask.end)
            words.append(masks)
            owners += [row.row] * len(masks)
        return RowMasks(tuple(owners), np.concatenate(words) if words else self._all()[:0]), ended

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _wanted(self, row: ScheduledRow) -> _Mask | None:
        constraint = self._sequences.get(row.number)
        if constraint is None or constraint.mask is not None:
            return None
        constraint.mask = _Mask(constraint, row.draft_ids, self._num_words)
        return constraint.mask

    def _all(self) -> MaskWords:
        return np.full((1, self._num_words), -1, dtype=np.int32)

    def _run(self, queue: deque[_Mask]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._threads, _make_all, queue)

    def _watch(self, mask: _Mask) -> None:
        """End the sequence of a mask that takes longer than LIMIT_S. Time in which it waits for a thread does not count."""
        if mask.made is not None:
            return
        left_s = LIMIT_S if mask.begun_s is None else mask.begun_s + LIMIT_S - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._watch, mask)
        else:
            mask.give_up(f"a mask took longer than {LIMIT_S:g} s")
            self._late_one_made()


class _Constraint:
    def __init__(self, sequence: Sequence, words: int, eos_token_ids: frozenset[int], *, looks_ahead: bool) -> None:
        params = sequence.sampling
        self.sequence = sequence
        self.fresh_ids: list[int] = []  # settled tokens that the matchers have not received
        self.mask: _Mask | None = None  # mask of the next sample, once requested
        self._num_words = words
        self._looks_ahead = looks_ahead
        self._matchers: tuple[TokenMatcher, ...] | None = None
        self._allowed = None if params.allowed_token_ids is None else mask_of_set(params.allowed_token_ids, words)
        self._ends = params.stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids)
        self._not_ends = ~mask_of(self._ends, words) if params.min_tokens else None

    def take(self) -> _Mask:
        mask, self.mask = self.mask, None
        assert mask is not None
        return mask

    def masks(self, draft_ids: Several[int]) -> _Made | Ended:
        """Return the masks for the next sample and for the sample after each draft token, up to the first draft token that is not
        allowed or ends the text."""
        if self._matchers is None:
            self._matchers = tuple(make() for make in self.sequence.sampling.matchers)
        fresh_ids, self.fresh_ids = self.fresh_ids, []
        for matcher in self._matchers:
            for token_id in fresh_ids:
                matcher.accept(token_id)
        mask = self._mask(self._matchers, self.sequence.num_output_tokens)
        if isinstance(mask, Ended):
            return mask
        masks, forced = [mask], None
        if draft_ids or (self._looks_ahead and only_token(mask) is not None):
            take_back = [matcher.checkpoint() for matcher in self._matchers]
            with contextlib.suppress(Exception):  # draft tokens may never be sampled, so their errors do not matter
                self._go_on(masks, draft_ids, self._matchers)
                if self._looks_ahead:
                    forced = self._forced(masks[-1], self.sequence.num_output_tokens + len(masks) - 1, self._matchers)
            for checkpoint in take_back:
                checkpoint()
        return _Made(np.stack(masks), forced=forced)

    def _forced(self, mask: MaskWords | Ended, start: int, matchers: tuple[TokenMatcher, ...]) -> Forced | None:
        """Return the tokens that the grammar forces from position `start` on, as long as only one token is allowed. `mask`: mask of
        that position."""
        ids: list[int] = []
        while len(ids) < MAX_FORCED and not isinstance(mask, Ended):
            token_id = only_token(mask)
            if token_id is None or token_id in self._ends:
                break
            ids.append(token_id)
            for matcher in matchers:
                matcher.accept(token_id)
            mask = self._mask(matchers, start + len(ids))
        return Forced(start, tuple(ids)) if ids else None

    def _go_on(self, masks: list[MaskWords], draft_ids: Several[int], matchers: tuple[TokenMatcher, ...]) -> None:
        """Append the masks after each of `draft_ids` to `masks`, whose last entry is the mask before them."""
        for num, token_id in enumerate(draft_ids, self.sequence.num_output_tokens + 1):
            if token_id in self._ends or not allows(masks[-1], token_id):
                return
            for matcher in matchers:
                matcher.accept(token_id)
            mask = self._mask(matchers, num)
            if isinstance(mask, Ended):
                return
            masks.append(mask)

    def _mask(self, matchers: tuple[TokenMatcher, ...], num_tokens: int) -> MaskWords | Ended:
        mask = np.full(self._num_words, -1, dtype=np.int32)
        for matcher in matchers:
            allowed = matcher.allowed()
            if allowed is None:
                continue
            words = np.frombuffer(allowed, dtype="<i4")
            if not words.any():
                return Ended(self.sequence.number, FinishReason.STOP)
            mask[: len(words)] &= words
            mask[len(words) :] = 0
        if self._allowed is not None:
            mask &= self._allowed
        if not mask.any():
            return Ended(self.sequence.number, FinishReason.INVALID, "its constraints leave no token to draw")
        if self._not_ends is not None and num_tokens < self.sequence.sampling.min_tokens:
            return mask if (mask & self._not_ends).any() else Ended(self.sequence.number, FinishReason.STOP)
        return mask


class _Made(NamedTuple):
    words: MaskWords  # [masks, words]
    end: Ended | None = None  # if set, `words` allows all tokens
    forced: Forced | None = None


class _Mask:
    """Masks for a sequence's next sample and for samples after its draft tokens. A thread computes them and sets `made`, unless the
    event loop cancels the mask first."""

    def __init__(self, constraint: _Constraint, draft_ids: tuple[int, ...], words: int) -> None:
        self._constraint = constraint
        self._draft_ids = draft_ids
        self._words = words
        self.begun_s: float | None = None
        self.made: _Made | None = None

    @property
    def end(self) -> Ended | None:
        return None if self.made is None else self.made.end

    @property
    def forced(self) -> Forced | None:
        return None if self.made is None else self.made.forced

    def behind(self, draft_ids: tuple[int, ...]) -> MaskWords:
        """Return masks [M, words] for the row's current `draft_ids`. They may differ from the draft tokens for which the masks were
        computed."""
        assert self.made is not None
        pairs = zip(self._draft_ids, draft_ids, strict=False)
        num_equal = next((num for num, (one, other) in enumerate(pairs) if one != other), len(draft_ids))
        return self.made.words[: 1 + min(num_equal, len(self._draft_ids))]

    def make(self) -> None:
        if self.made is not None:
            return
        self.begun_s = time.monotonic()
        try:
            made = self._constraint.masks(self._draft_ids)
        except ConstraintError as error:
            made = Ended(self._constraint.sequence.number, FinishReason.INVALID, str(error))
        except BaseException as error:  # panics of libraries are not Exceptions
            made = Ended(self._constraint.sequence.number, FinishReason.ERROR, f"a constraint failed: {error}")
        self.made = self._ended(made) if isinstance(made, Ended) else made

    def give_up(self, error: str) -> None:
        """Discard the mask and end the sequence with `error`. A matcher that is still running finishes without effect."""
        self.made = self._ended(Ended(self._constraint.sequence.number, FinishReason.ERROR, error))

    def _ended(self, end: Ended) -> _Made:
        return _Made(np.full((1, self._words), -1, dtype=np.int32), end)


def _make_all(queue: deque[_Mask]) -> None:
    for mask in _emptied(queue):
        mask.make()


def _emptied(queue: deque[_Mask]) -> Iterator[_Mask]:
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


async def _either(*awaited: Coroutine[None, None, object]) -> None:
    tasks = [asyncio.ensure_future(each) for each in awaited]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _passed(event: GpuEvent) -> None:
    with contextlib.suppress(Exception):  # the sampling raises the exception
        await event.wait()
