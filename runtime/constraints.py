"""Constraints: the matchers of the sequences that have some, and the masks their next draws wait for.

Matchers run on threads of their own, side by side where a library lets go of the interpreter, and never on the event loop. One
that takes longer than LIMIT_S ends its sequence: all others of the step are waiting.
A sequence's drawn tokens are noted as they settle and shown to its matchers when its next mask is wanted, so that what
was drawn last is never asked about twice and a preempted sequence loses nothing. Knows neither what a matcher means nor steps."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from runtime.api import FinishReason, ModelInfo, TokenMatcher
from runtime.masks import RowMasks, Words, mask_of, num_words
from runtime.sequence import Sequence

LIMIT_S = 1.0  # for the masks of a step, of which a usual one takes ten microseconds and a bad one ten milliseconds
ROWS_PER_THREAD = 8  # fewer than that are done before another thread has woken
MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that draws no more: complete (STOP), or with an error of its own."""

    sequence: Sequence
    finish: FinishReason
    error: str | None = None


class Constraints:
    def __init__(self, model: ModelInfo) -> None:
        self._num_words = num_words(model.vocab_size)
        self._eos_token_ids = model.eos_token_ids
        self._constraints: dict[Sequence, _Constraint] = {}
        self._threads = ThreadPoolExecutor(
            max(2, min(MAX_THREADS, os.cpu_count() or 1)), thread_name_prefix="oneloop-masks"
        )

    def add(self, sequence: Sequence) -> None:
        if sequence.has_matchers:
            self._constraints[sequence] = _Constraint(sequence, self._num_words, self._eos_token_ids)

    def note(self, sequence: Sequence, token_id: int) -> None:
        """`token_id` has settled."""
        constraint = self._constraints.get(sequence)
        if constraint is not None:
            constraint.fresh_ids.append(token_id)

    def forget(self, sequence: Sequence) -> None:
        self._constraints.pop(sequence, None)

    async def masks(self, rows: Several[tuple[int, Sequence]]) -> tuple[RowMasks, list[Ended]]:
        """What the sequence of each device row may draw next, everything it drew having been noted; and those that draw no more.

        The mask of a sequence that has ended, now or before, allows everything: nobody will look at what it draws."""
        words = np.full((len(rows), self._num_words), -1, dtype=np.int32)
        wanted = [(self._constraints.get(sequence), mask) for (_, sequence), mask in zip(rows, words, strict=True)]
        live = [(constraint, mask) for constraint, mask in wanted if constraint is not None]
        share = max(ROWS_PER_THREAD, -(-len(live) // MAX_THREADS))
        parts = [_Part(live[first : first + share]) for first in range(0, len(live), share)]
        ended: list[Ended] = []
        while parts:
            parts = await self._run(parts, ended)
        return RowMasks(tuple(row for row, _ in rows), words), ended

    async def _run(self, parts: list[_Part], ended: list[Ended]) -> list[_Part]:
        """What is left to do: whatever stood behind a matcher that took too long."""
        loop = asyncio.get_running_loop()
        jobs = {loop.run_in_executor(self._threads, part.run): part for part in parts}
        _, late = await asyncio.wait(jobs, timeout=LIMIT_S)
        rests = [jobs[job].give_up() for job in late]
        for part in parts:
            ended += part.ended
        return [rest for rest in rests if rest is not None]

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class _Constraint:
    def __init__(self, sequence: Sequence, words: int, eos_token_ids: frozenset[int]) -> None:
        params = sequence.request.params
        ends = params.stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids)
        self.sequence = sequence
        self.fresh_ids: list[int] = []  # settled, and not yet shown to the matchers
        self._matchers: tuple[TokenMatcher, ...] | None = None
        self._allowed = None if params.allowed_token_ids is None else mask_of(params.allowed_token_ids, words)
        self._not_ends = ~mask_of(ends, words) if params.min_tokens else None

    def fill(self, mask: Words) -> Ended | None:
        """Narrow `mask`, which is all ones."""
        if self._matchers is None:
            self._matchers = tuple(make() for make in self.sequence.request.params.matchers)
        fresh_ids, self.fresh_ids = self.fresh_ids, []
        for matcher in self._matchers:
            for token_id in fresh_ids:
                matcher.accept(token_id)
            allowed = matcher.allowed()
            if allowed is None:
                continue
            words = np.frombuffer(allowed, dtype="<i4")
            if not words.any():
                return Ended(self.sequence, FinishReason.STOP)
            mask[: len(words)] &= words
            mask[len(words) :] = 0
        if self._allowed is not None:
            mask &= self._allowed
        if not mask.any():
            return Ended(self.sequence, FinishReason.ERROR, "its constraints leave no token to draw")
        params = self.sequence.request.params
        if self._not_ends is not None and self.sequence.num_output_tokens < params.min_tokens:
            return None if (mask & self._not_ends).any() else Ended(self.sequence, FinishReason.STOP)
        return None


class _Part:
    """Masks that one thread makes, one after another."""

    def __init__(self, rows: Several[tuple[_Constraint, Words]]) -> None:
        self.ended: list[Ended] = []
        self._rows = rows
        self._num_begun = 0
        self._num_done = 0
        self._given_up = False
        self._lock = threading.Lock()

    def run(self) -> None:
        for constraint, mask in self._rows:
            with self._lock:
                if self._given_up:
                    return
                self._num_begun += 1
            made = mask.copy()  # so that a late one is nobody's
            end = _fill(constraint, made)
            with self._lock:
                if self._given_up:
                    return
                self._num_done += 1
                mask[:] = made
                if end is not None:
                    self.ended.append(end)

    def give_up(self) -> _Part | None:
        """Ends the row under way, whose matcher goes on for nobody, and leaves those behind it to another part."""
        with self._lock:
            self._given_up = True
            for constraint, _ in self._rows[self._num_done : self._num_begun]:
                error = f"a mask took longer than {LIMIT_S:g} s"
                self.ended.append(Ended(constraint.sequence, FinishReason.ERROR, error))
            rest = self._rows[self._num_begun :]
        return _Part(rest) if rest else None


def _fill(constraint: _Constraint, mask: Words) -> Ended | None:
    try:
        end = constraint.fill(mask)
    except BaseException as error:  # a library's panic is no Exception
        end = Ended(constraint.sequence, FinishReason.ERROR, f"a constraint failed: {error}")
    if end is not None:
        mask.fill(-1)
    return end
