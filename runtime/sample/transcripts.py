"""Sampling stage of rows with TranscriptRules: suppressed tokens and timestamp rules (Whisper, Radford et al. 2022).

Timestamps come in pairs, never decrease, and begin the text. If all timestamps together are likelier than any text token, a
timestamp is drawn. This rule reads the logits, so the stage changes them before the draw, and log-probabilities are computed from
the changed logits. The earlier tokens of a row that the rules need are in a device table, which each draw updates, so captured
graphs can contain the stage."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ops.transfer import upload
from runtime.batch import RowBinding
from runtime.sample.stage import Record

MAX_TIMESTAMPS = 1501  # 0.00 to 30.00 s, 20 ms apart
MAX_CONTROL = 256  # ids from the end of text to the first timestamp
MAX_SUPPRESSED = 256  # tokens of one request, on the way
MAX_FIRST_SUPPRESSED = 16

# Columns of a row's facts. All are token ids but the first.
FIRST_POSITION = 0  # of the output; -1: no rules
TIMESTAMP_BEGIN = 1
TEXT_END = 2
MAX_INITIAL = 3
LAST = 4  # -1: none yet
LAST_BUT_ONE = 5
LAST_TIMESTAMP = 6
FACTS = 7


class Transcripts:
    """Sampling stage for transcripts. Draft tokens are not supported: a row has one logits row per step."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        # The last row is nobody's: logits rows that are not sampled read and write it.
        facts = torch.full((max_num_seqs + 1, FACTS), -1, dtype=torch.int64, device=device)
        self._facts = facts
        self._suppressed = facts.new_full((max_num_seqs + 1, MAX_SUPPRESSED), -1)
        self._first_suppressed = facts.new_full((max_num_seqs + 1, MAX_FIRST_SUPPRESSED), -1)
        self._vocabulary = torch.arange(vocab_size, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory of the tables, in bytes."""
        return sum(t.nbytes for t in (self._facts, self._suppressed, self._first_suppressed, self._vocabulary))

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        """Write the rules of the new sequence of `row`. Raises ValueError if it suppresses more ids than the tables hold, or if
        there are too many ids between text and timestamps."""
        rules, facts = binding.params.transcript, np.full(FACTS, -1, dtype=np.int64)
        if rules is not None:
            begin = self._vocab_size if rules.timestamp_begin is None else rules.timestamp_begin
            if begin < self._vocab_size and not 0 <= begin - rules.text_end <= MAX_CONTROL:
                raise ValueError(f"text ends at {rules.text_end}: not within {MAX_CONTROL} ids before the timestamps")
            stamps = [id for id in binding.output_ids if id >= begin]
            before = (-1, -1, *binding.output_ids)
            facts[:] = (
                len(binding.prompt_ids),
                begin,
                rules.text_end,
                begin + rules.max_initial_timestamp if rules.max_initial_timestamp is not None else self._vocab_size,
                before[-1],
                before[-2],
                stamps[-1] if stamps else -1,
            )
            upload(self._suppressed[row], _filled(rules.suppressed_ids, MAX_SUPPRESSED))
            upload(self._first_suppressed[row], _filled(rules.first_suppressed_ids, MAX_FIRST_SUPPRESSED))
        upload(self._facts[row], facts)

    def apply(self, logits: Tensor, sample_rows: Tensor, sample_positions: Tensor) -> None:
        """Apply the rules to logits [L, V] in place. sample_rows [L] int32, sample_positions [L] int64: see `Sampler.sample`."""
        rows = self._rows(sample_rows)
        facts = self._facts[rows]
        has_rules = facts[:, FIRST_POSITION] >= 0
        is_first = has_rules & (sample_positions == facts[:, FIRST_POSITION])
        _suppress(logits, self._suppressed[rows], has_rules)
        _suppress(logits, self._first_suppressed[rows], is_first)
        self._apply_timestamps(logits, facts, has_rules & (facts[:, TIMESTAMP_BEGIN] < self._vocab_size), is_first)

    def _apply_timestamps(self, logits: Tensor, facts: Tensor, stamped: Tensor, is_first: Tensor) -> None:
        begin, last = facts[:, TIMESTAMP_BEGIN, None], facts[:, LAST]
        last_is_stamp = last >= begin[:, 0]
        # The first token and the one before it count as timestamps where they are missing, as in the reference.
        before_is_stamp = (facts[:, LAST_BUT_ONE] >= begin[:, 0]) | (facts[:, LAST_BUT_ONE] < 0)
        closes = stamped & last_is_stamp & ~before_is_stamp  # an end of a segment: its twin or the text's end follows
        opens = stamped & last_is_stamp & before_is_stamp  # a begin of a segment: text follows

        window = self._vocabulary[: MAX_CONTROL + MAX_TIMESTAMPS]
        last_place = self._vocab_size - len(window)
        ids = (begin - MAX_CONTROL).clamp(0, last_place) + window
        is_stamp = (ids >= begin) & stamped[:, None]
        least = torch.where(facts[:, LAST_TIMESTAMP] < 0, begin[:, 0], facts[:, LAST_TIMESTAMP] + (~closes).long())
        banned = (ids < least[:, None]) | opens[:, None] | (is_first[:, None] & (ids > facts[:, MAX_INITIAL, None]))
        is_banned_text = closes[:, None] & (ids < facts[:, TEXT_END, None])
        kept = logits.gather(1, ids).masked_fill((is_stamp & banned) | is_banned_text, -torch.inf)

        # Adding -inf to a row costs a fraction of filling it under a mask, on a CPU.
        logits.add_(_minus_infinity(closes, logits)).scatter_(1, ids, kept.masked_fill(is_stamp, -torch.inf))
        total = kept.float().masked_fill(~is_stamp, -torch.inf).logsumexp(1)
        must_stamp = stamped & (is_first | (total > logits.amax(1).float()))
        logits.add_(_minus_infinity(must_stamp, logits))
        logits.scatter_(1, ids, torch.where(is_stamp | ~must_stamp[:, None], kept, -torch.inf))

    def advance(self, sample_rows: Tensor, ids: Tensor) -> None:
        """Update the tables with the drawn token ids [L] int64 of sample_rows [L] int32."""
        rows = self._rows(sample_rows)
        facts = self._facts[rows]
        is_stamp = ids >= facts[:, TIMESTAMP_BEGIN]
        facts[:, LAST_BUT_ONE] = facts[:, LAST]
        facts[:, LAST] = ids
        facts[:, LAST_TIMESTAMP] = torch.where(is_stamp, ids, facts[:, LAST_TIMESTAMP])
        self._facts[rows] = facts

    def _rows(self, sample_rows: Tensor) -> Tensor:
        rows = sample_rows.long()
        return torch.where(rows < 0, len(self._facts) - 1, rows)


def _suppress(logits: Tensor, ids: Tensor, where: Tensor) -> None:
    """Set logits [L, V] of token ids [L, N] to -inf in the rows where `where` [L] is true. An id of -1 means none."""
    places = ids.clamp(min=0)
    logits.scatter_(1, places, logits.gather(1, places).masked_fill(where[:, None] & (ids >= 0), -torch.inf))


def _minus_infinity(where: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(len(where)).masked_fill(where, -torch.inf)[:, None]


def _filled(ids: frozenset[int], room: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return an array of `room` ids: `ids`, repeated as often as needed, since duplicates have no effect; -1 if there are none.
    Raises ValueError if there are more."""
    if len(ids) > room:
        raise ValueError(f"{len(ids)} suppressed tokens; the maximum is {room}")
    return np.resize(np.array(sorted(ids) or [-1], dtype=np.int64), room)
