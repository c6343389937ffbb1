"""StepInputs: tensors that the model and the sampler read in one step, including draft tokens.

Independent of the device. Each device has its own implementation of `Inputs`, which fills the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import ops
from ops.sampling.tables import Drafts
from ops.transfer import index_on
from runtime.batch import Pool, Sample, ScheduledRow
from runtime.models.forward_step import ForwardStep
from runtime.runner.host_tables import Int64s


class StepInputs(NamedTuple):
    """Inputs of a step with S rows of logits.

    `logits_of`: scheduled rows that have logits, in order. `logit_tokens` [S] int64: index in the step of the token of each
    logits row; None if every token has logits. `sample_rows` [S] int32: row that is sampled, or -1. `sample_positions` [S]
    int64: position of the sampled token. `drafts`: draft tokens, or None. `rows` [R]: device rows of the step, -1 for padding.
    `query_start_loc` [R + 1]: index of the first token of each row."""

    forward: ForwardStep
    logits_of: tuple[ScheduledRow, ...]
    logit_tokens: Tensor | None
    sample_rows: Tensor
    sample_positions: Tensor
    rows: Tensor
    query_start_loc: Tensor
    drafts: Drafts | None = None


class Inputs(Protocol):
    """Builder of a step's input tensors, with per-row tables that persist between steps. Call it in launch order.

    `last_ids` [max_num_seqs] int64: last sampled id of each row, an input of the next step. `num_computed` [max_num_seqs],
    integers: number of each row's tokens in the KV cache after all filled steps, less rejected draft tokens once known.
    `draft_ids` [max_num_seqs, D] int64: draft tokens from a drafter; the next step may use only some of them."""

    @property
    def last_ids(self) -> Tensor: ...
    @property
    def draft_ids(self) -> Tensor: ...
    @property
    def num_computed(self) -> Tensor: ...

    def arranged(self, rows: tuple[ScheduledRow, ...]) -> tuple[ScheduledRow, ...]:
        """Return `rows` in the order in which a step computes them."""
        ...

    def fill(self, rows: tuple[ScheduledRow, ...]) -> StepInputs:
        """Return the inputs of a step with `rows`, which are in computing order. They are valid until the next call."""
        ...

    def behind(self, rows: Tensor, ids: Tensor, offset: Tensor) -> ForwardStep:
        """Return a step of one more token for each of `rows` [B] int64 (-1: padding, at the end): token `ids` [B] int64, at
        `offset` [1] int64 after the row's first uncomputed position. All tensors stay on the device; no table changes."""
        ...

    def put_drafts(self, rows: Tensor, nth: Tensor, ids: Tensor) -> None:
        """Store `ids` [B] int64 as draft tokens of `rows` [B] int64 (-1: ignored). `nth` [1] int64: index of the draft token."""
        ...


def token_types(rows: Sequence[ScheduledRow]) -> list[int] | None:
    """Return the token type of each token of the step, or None if all are 0."""
    given = [row.work.params.token_type_ids if type(row.work) is Pool else None for row in rows]
    if not any(given):
        return None
    kinds: list[int] = []
    for row, own in zip(rows, given, strict=True):
        kinds.extend(own[row.start : row.end] if own else (0,) * row.num_tokens)
    return kinds


def rope_positions(rows: Sequence[ScheduledRow], positions: Int64s) -> Int64s | None:
    """Return M-RoPE positions [3, T] of a step's tokens, or None if no row has media positions. `positions` [T]: positions of
    tokens in rows without media."""
    if not any(row.media is not None and row.media.rope_positions is not None for row in rows):
        return None
    by_axis = np.repeat(positions[None], 3, axis=0)
    for row, stop in zip(rows, accumulate(row.num_tokens for row in rows), strict=True):
        if row.media is not None and row.media.rope_positions is not None:
            by_axis[:, stop - row.num_tokens : stop] = row.media.rope_positions
    return by_axis


def seen_across(
    by_table: Sequence[ops.AttentionMeta], num_outputs: Sequence[int | None], num_tokens: int
) -> tuple[ops.AttentionMeta, ...]:
    """Return `by_table`, attention metadata per block table, changed for cross-attention. `num_outputs`: number of encoder
    outputs that a table's layers attend to; None: no cross-attention."""
    return tuple(
        meta if num is None else ops.across(meta, num_tokens, num)
        for meta, num in zip(by_table, num_outputs, strict=True)
    )


def seen_in_chunks(
    by_table: Sequence[ops.AttentionMeta], chunks: Sequence[int | None], positions: Tensor, block_size: int,
    num_pieces: Callable[[int], int],
) -> tuple[ops.AttentionMeta, ...]:  # fmt: skip
    """Return `by_table`, attention metadata per block table, split into chunks for tables with chunked attention. `chunks`:
    chunk size per table, or None. `num_pieces(chunk)`: maximum number of requests after splitting."""
    metas = list(by_table)
    for chunk in {chunk for chunk in chunks if chunk is not None}:
        tables = [table for table, of_table in enumerate(chunks) if of_table == chunk]
        pieces = ops.in_chunks([metas[table] for table in tables], positions, chunk, block_size, num_pieces(chunk))
        for table, meta in zip(tables, pieces, strict=True):
            metas[table] = meta
    return tuple(metas)


class LogitsRows(NamedTuple):
    """Logits rows of a step with draft tokens. `logits_of`: scheduled rows that sample. `tokens`: tokens whose logits are
    computed. `rows`: row of each token, -1 if its mask is late. `is_guess`: 1 for each draft token, else 0."""

    logits_of: tuple[ScheduledRow, ...]
    tokens: list[int]
    rows: list[int]
    is_guess: list[int]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow]) -> LogitsRows:
        sampling: list[ScheduledRow] = []
        tokens: list[int] = []
        owners: list[int] = []
        is_guess: list[int] = []
        for row, stop in zip(rows, accumulate(row.num_tokens for row in rows), strict=True):
            work = row.work
            if isinstance(work, Sample):
                sampling.append(row)
                tokens.extend(range(stop - 1 - work.num_drafts, stop))
                owners.extend([-1 if work.masked else row.row] * (1 + work.num_drafts))
                is_guess += (0, *[1] * work.num_drafts)
        return cls(tuple(sampling), tokens, owners, is_guess)


def inputs_with_drafts(
    forward: ForwardStep, rows: Sequence[ScheduledRow], num_computed: Tensor, table_rows: Tensor, query_start_loc: Tensor
) -> StepInputs:  # fmt: skip
    """Return the inputs of a step with draft tokens, all of which have logits. It uploads data, so it cannot be captured.
    `table_rows`, `query_start_loc`: `rows` and `query_start_loc` of the StepInputs."""
    device = forward.positions.device
    wanted = LogitsRows.of(rows)
    tokens, is_guess = index_on(device, wanted.tokens), index_on(device, wanted.is_guess)
    return StepInputs(
        forward=forward,
        logits_of=wanted.logits_of,
        logit_tokens=tokens,
        sample_rows=index_on(device, wanted.rows, torch.int32),
        sample_positions=forward.positions[tokens] + 1,
        rows=table_rows,
        query_start_loc=query_start_loc,
        drafts=Drafts(torch.where(is_guess > 0, forward.input_ids[tokens], -1), num_computed),
    )
