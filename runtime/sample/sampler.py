"""Sampler: sampling parameters of all rows in device tables, and the operation that samples with them.

After `bind`, sampling needs no data from the host. A captured graph that contains `sample` therefore works for any rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import ops
from ops.sampling.tables import FLAGS, PENALIZED, Drafts, Masks, SamplingTables
from ops.transfer import upload
from runtime.batch import RowBinding
from runtime.sample.allowed_tokens import AllowedTokens
from runtime.sample.draw import Draw
from runtime.sample.logit_bias import MAX_BIASES, LogitBias
from runtime.sample.min_tokens import MAX_STOP_TOKEN_IDS, MinTokens
from runtime.sample.penalties import Penalties
from runtime.sample.stage import Record, SamplerStage
from runtime.sample.synthetic import SyntheticAcceptance
from runtime.sample.transcripts import Transcripts


class Sampler:
    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], max_num_seqs: int, device: torch.device,
        synthetic: SyntheticAcceptance | None = None, *, transcribes: bool = False,
    ) -> None:  # fmt: skip
        """Allocate the sampling tables. `synthetic`: accepts draft tokens at random, for measurements. `transcribes`: rows may have
        TranscriptRules."""
        self._synthetic = synthetic
        self._transcripts = Transcripts(vocab_size, max_num_seqs, device) if transcribes else None
        max_bans = MAX_STOP_TOKEN_IDS + len(eos_token_ids)
        self._tables = tables = SamplingTables.empty(max_num_seqs, vocab_size, MAX_BIASES, max_bans, device)
        self._stages: tuple[SamplerStage, ...] = (
            Penalties(tables.counts),
            LogitBias(tables.bias_ids, tables.bias_values),
            MinTokens(tables.ban_ids, eos_token_ids),
            AllowedTokens(tables.masks),
            Draw(),
            *(() if self._transcripts is None else (self._transcripts,)),
        )

    @property
    def nbytes(self) -> int:
        """Device memory of the tables, in bytes."""
        return self._tables.nbytes + (0 if self._transcripts is None else self._transcripts.nbytes)

    def bind(self, row: int, binding: RowBinding) -> None:
        """Write the sampling parameters of the new sequence of `row` to the tables, on the current stream. Called before the row's
        first sample. Raises ValueError if a list is longer than its table."""
        record = Record()
        for stage in self._stages:
            stage.bind(row, binding, record)
        upload(self._tables.records[row], record.words)

    def sample(
        self, logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor,
        drafts: Drafts | None = None, masks: Masks | None = None,
    ) -> Tensor:  # fmt: skip
        """Sample ids [S] int64 from logits [S, V]. The id is NOT_FINITE if a logits row has NaN, +inf or no value above -inf.

        sample_rows [S] int32: row of each logits row; -1: not sampled, the id is undefined. sample_positions [S] int64: index of
        the sampled token in its sequence. Only rows with `drafts` have several logits rows. last_ids [max_num_seqs] int64: set to
        the last accepted id of each sampled row, 0 for NOT_FINITE. `masks`: masks of rows with grammars; no other row is then
        sampled."""
        if self._synthetic is not None and drafts is not None:
            self._synthetic.decide(logits, sample_positions, drafts)
        if self._transcripts is None:
            return ops.sample(logits, sample_rows, sample_positions, last_ids, self._tables, drafts, masks)
        self._transcripts.apply(logits, sample_rows, sample_positions)
        ids = ops.sample(logits, sample_rows, sample_positions, last_ids, self._tables, drafts, masks)
        self._transcripts.advance(sample_rows, ids)
        return ids

    def guessing(self) -> GuessSampler:
        """Return a sampler for a draft model, with a copy of the current tables."""
        return GuessSampler(self._tables)


class GuessSampler:
    """Sampler of draft tokens from a draft model's logits, with the rows' parameters and noise. It has no penalties, since it
    counts no tokens."""

    def __init__(self, tables: SamplingTables) -> None:
        records = tables.records.clone()
        records[:, FLAGS] &= ~PENALIZED
        self._tables = replace(tables, records=records)
        self._last_ids = records.new_empty(len(records), dtype=torch.int64)

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return ids [B] int64 sampled from logits [B, V]; 0 for unusable logits. rows [B] int32, positions [B] int64: see
        `Sampler.sample`."""
        return ops.sample(logits, rows, positions, self._last_ids, self._tables).clamp(min=0)
