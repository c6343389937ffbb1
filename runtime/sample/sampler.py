"""Sampler: what each row asks, stage by stage, in tables on the device; and the one operation that reads them.

After `bind` nothing of a row is known to the host, so `sample` can be captured in a graph and replayed for any rows."""

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
from runtime.sample.stage import Record, Stage
from runtime.sample.synthetic import SyntheticAcceptance
from runtime.sample.transcripts import Transcripts


class Sampler:
    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], max_num_seqs: int, device: torch.device,
        synthetic: SyntheticAcceptance | None = None, *, transcribes: bool = False,
    ) -> None:  # fmt: skip
        """Allocate the sampling tables. `synthetic` decides which drafts are accepted, instead of the model. `transcribes`: rows
        may have TranscriptRules."""
        self._synthetic = synthetic
        self._transcripts = Transcripts(vocab_size, max_num_seqs, device) if transcribes else None
        max_bans = MAX_STOP_TOKEN_IDS + len(eos_token_ids)
        self._tables = tables = SamplingTables.empty(max_num_seqs, vocab_size, MAX_BIASES, max_bans, device)
        self._stages: tuple[Stage, ...] = (
            Penalties(tables.counts),
            LogitBias(tables.bias_ids, tables.bias_values),
            MinTokens(tables.ban_ids, eos_token_ids),
            AllowedTokens(tables.masks),
            Draw(),
            *(() if self._transcripts is None else (self._transcripts,)),
        )

    @property
    def nbytes(self) -> int:
        """Device memory of the tables, bytes."""
        return self._tables.nbytes + (0 if self._transcripts is None else self._transcripts.nbytes)

    def bind(self, row: int, binding: RowBinding) -> None:
        """A new sequence has taken `row`. Enqueued on the current stream, before the step that first samples it.

        Raises ValueError for a list longer than its table has room for."""
        record = Record()
        for stage in self._stages:
            stage.bind(row, binding, record)
        upload(self._tables.records[row], record.words)

    def sample(
        self, logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor,
        drafts: Drafts | None = None, masks: Masks | None = None,
    ) -> Tensor:  # fmt: skip
        """logits [S, V] -> ids [S] int64, NOT_FINITE where a logits row holds NaN, +inf or nothing above -inf.

        Logits row s belongs to row sample_rows[s] (int32), whose token gets index sample_positions[s] (int64); -1 asks for
        nothing, and the id there means nothing. A row has several only where there are `drafts`. last_ids [max_num_seqs] int64:
        takes the last id that each sampled row gains, 0 for NOT_FINITE. `masks`: of rows with matchers, and no other is sampled."""
        if self._synthetic is not None and drafts is not None:
            self._synthetic.decide(logits, sample_positions, drafts)
        if self._transcripts is None:
            return ops.sample(logits, sample_rows, sample_positions, last_ids, self._tables, drafts, masks)
        self._transcripts.apply(logits, sample_rows, sample_positions)
        ids = ops.sample(logits, sample_rows, sample_positions, last_ids, self._tables, drafts, masks)
        self._transcripts.advance(sample_rows, ids)
        return ids

    def guessing(self) -> GuessSampler:
        """Return a sampler for a draft model, with the current tables."""
        return GuessSampler(self._tables)


class GuessSampler:
    """Draws what rows would draw of other logits, by their own settings and noise. It counts nothing, so penalties are left out."""

    def __init__(self, tables: SamplingTables) -> None:
        records = tables.records.clone()
        records[:, FLAGS] &= ~PENALIZED
        self._tables = replace(tables, records=records)
        self._last_ids = records.new_empty(len(records), dtype=torch.int64)

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """logits [B, V] -> ids [B] int64, 0 where they are unusable. rows [B] int32, positions [B] int64 as in `Sampler.sample`."""
        return ops.sample(logits, rows, positions, self._last_ids, self._tables).clamp(min=0)
