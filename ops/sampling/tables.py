"""Sampling tables: sampling parameters by row, in device memory that captured graphs read.

Each row has a record of RECORD words. Variable-length data has tables of its own, which are read only if the record's flags
require it. Written by runtime/sample, read by the op. Tensors only: no request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

RECORD = 16  # 32-bit words, so that a record is one 64-byte line
# Words of a record. Words marked "float" contain the bits of a float32.
FLAGS = 0
INVERSE_TEMPERATURE = 1  # float
TOP_K = 2  # 0: off
TOP_P = 3  # float, 1: off
MIN_P_MARGIN = 4  # float: temperature * log(min_p), the maximum distance from the largest logit; -inf: off
SEED_LOW = 5
SEED_HIGH = 6
PRESENCE = 7  # float
FREQUENCY = 8  # float
REPETITION = 9  # float
INVERSE_REPETITION = 10  # float
NUM_BIASES = 11
NUM_BANS = 12
FREE_FROM = 13  # first position at which bans do not apply

# Flags. No flag: greedy.
SAMPLED = 1
FILTERED = 2  # only together with SAMPLED
PENALIZED = 4
BIASED = 8
BANNED = 16
MASKED = 32

MAX_COUNT = 0x7FFF  # maximum count; bit 15 marks tokens of the prompt
NOT_FINITE = -1  # instead of an id


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Sampling parameters, indexed by row first.

    records [R, RECORD] int32. counts [R, V] int16: occurrences in the output, and bit 15 for tokens of the prompt. bias_ids
    [R, B] int32, ascending, with bias_values [R, B] float32. ban_ids [R, N] int32, ascending. masks [R, V / 32 up] int32:
    bit t % 32 of word t // 32 allows token t. Only the first NUM_BIASES and NUM_BANS entries of a row are valid, its counts
    only if it is PENALIZED, its mask only if it is MASKED."""

    records: Tensor
    counts: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    ban_ids: Tensor
    masks: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, vocab_size: int, max_biases: int, max_bans: int, device: torch.device
    ) -> SamplingTables:
        """Allocate tables in which every row is greedy."""
        return cls(
            records=torch.zeros((num_rows, RECORD), dtype=torch.int32, device=device),
            counts=torch.zeros((num_rows, vocab_size), dtype=torch.int16, device=device),
            bias_ids=torch.zeros((num_rows, max_biases), dtype=torch.int32, device=device),
            bias_values=torch.zeros((num_rows, max_biases), dtype=torch.float32, device=device),
            ban_ids=torch.zeros((num_rows, max_bans), dtype=torch.int32, device=device),
            masks=torch.zeros((num_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return sum(
            t.nbytes for t in (self.records, self.counts, self.bias_ids, self.bias_values, self.ban_ids, self.masks)
        )


class Drafts(NamedTuple):
    """Draft tokens of the logits rows. ids [L] int64: the draft token after which each logits row was computed, negative for
    the first of a sequence; its logits rows are adjacent and in order. num_computed [R], integers: rejected draft tokens are
    subtracted.

    Each logits row samples as if the draft tokens before it were accepted. A sequence accepts samples up to the first that
    differs from the next draft token, or has none; these are counted, and the last one becomes its last id. Samples after it
    are meaningless."""

    ids: Tensor
    num_computed: Tensor


class Masks(NamedTuple):
    """Masks of one step, used instead of the tables': rows [L] int32, the index into words [M, V / 32 up] int32 for each
    logits row. Read only for rows that are MASKED."""

    rows: Tensor
    words: Tensor
