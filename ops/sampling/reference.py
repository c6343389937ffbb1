"""Sampling in plain torch, a row of logits at a time where a row asks for more than its largest logit. Any float dtype.

It reads the tables on the host, so on a CUDA device it waits for every row: the yardstick there, and the way on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ops.sampling import tables as t
from ops.sampling.noise import gumbel, noise_keys
from ops.sampling.tables import SamplingTables

LARGEST = torch.finfo(torch.float32).max
# [256, 8] float32: what the eight tokens of a byte of a mask may score at most.
_LIMITS = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, torch.inf, -torch.inf)


def sample(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor, tables: SamplingTables
) -> Tensor:
    rows = sample_rows.tolist()
    row_index = sample_rows.long()
    flags = tables.records[row_index, t.FLAGS].tolist()
    special = [index for index, row in enumerate(rows) if row >= 0 and flags[index]]
    if len(special) < len(rows):
        largest, ids = logits.max(dim=-1)  # the first of several; NaN counts as the largest
        finite = largest.isfinite()
    else:
        ids, finite = torch.empty_like(row_index), torch.empty_like(row_index, dtype=torch.bool)
    for index in special:
        finite[index], ids[index] = _sample_one(logits[index], rows[index], int(sample_positions[index]), tables)
    ids.masked_fill_(~finite, t.NOT_FINITE)
    inputs = ids.clamp(min=0)  # NOT_FINITE is no input
    if rows and min(rows) < 0:
        sampling = row_index >= 0
        row_index, inputs = row_index[sampling], inputs[sampling]
    last_ids[row_index] = inputs
    return ids


@dataclass(frozen=True, slots=True)
class _Record:
    words: list[int]
    floats: list[float]  # the same bits


def _sample_one(logits: Tensor, row: int, position: int, tables: SamplingTables) -> tuple[bool, int]:
    """Whether the logits [V] are usable, and the id sampled from them."""
    words = tables.records[row]
    record = _Record(words.tolist(), words.view(torch.float32).tolist())
    flags = record.words[t.FLAGS]
    scores = logits.to(torch.float32, copy=True)
    adjust(scores, record, position, row, tables)
    largest, chosen = (float(value) for value in scores.max(dim=-1))
    if not -torch.inf < largest < torch.inf:
        return False, 0
    drawn = _draw(scores, record, position, largest) if flags & t.SAMPLED else int(chosen)
    if flags & t.PENALIZED:
        count = tables.counts[row, drawn]
        count += (count & t.MAX_COUNT) < t.MAX_COUNT
    return True, drawn


def adjust(scores: Tensor, record: _Record, position: int, row: int, tables: SamplingTables) -> None:
    """Penalties, bias, bans and mask, in this order, on scores [V] float32 in place."""
    flags = record.words[t.FLAGS]
    if flags & t.PENALIZED:
        packed = tables.counts[row]
        punished = scores * torch.where(scores > 0, record.floats[t.INVERSE_REPETITION], record.floats[t.REPETITION])
        torch.where(packed != 0, punished, scores, out=scores)
        counts = (packed & t.MAX_COUNT).to(torch.float32)
        scores.sub_(counts * record.floats[t.FREQUENCY] + (counts > 0) * record.floats[t.PRESENCE])
    if flags & t.BIASED:
        num = record.words[t.NUM_BIASES]
        scores[tables.bias_ids[row, :num].long()] += tables.bias_values[row, :num]
    if flags & t.BANNED and position < record.words[t.FREE_FROM]:
        scores[tables.ban_ids[row, : record.words[t.NUM_BANS]].long()] = -torch.inf
    if flags & t.MASKED:
        # By whole bytes, and by a minimum: filling by a mask of booleans takes eight times as long.
        limits = _LIMITS.to(scores.device).index_select(0, tables.masks[row].view(torch.uint8).int())
        torch.minimum(scores, limits.flatten()[: len(scores)], out=scores)


def _draw(scores: Tensor, record: _Record, position: int, largest: float) -> int:
    keys = noise_keys(record.words[t.SEED_LOW], record.words[t.SEED_HIGH], position)
    ids: Tensor | int = len(scores)
    allowed = None
    if record.words[t.FLAGS] & t.FILTERED:
        allowed = (scores >= threshold(scores, record, largest)).nonzero()[:, 0]
        scores = scores[allowed]
        ids = allowed.to(torch.int32)
    perturbed = gumbel(ids, keys).to(scores.device)
    if abs(largest * record.floats[t.INVERSE_TEMPERATURE]) < LARGEST:
        perturbed.add_(scores, alpha=record.floats[t.INVERSE_TEMPERATURE])
    else:  # a huge logit over a small temperature must not pass for an infinite one
        scaled = (scores * record.floats[t.INVERSE_TEMPERATURE]).clamp_(-LARGEST, LARGEST)
        perturbed.add_(torch.where(scores == -torch.inf, scores, scaled))
    index = int(perturbed.max(dim=-1).indices)
    return index if allowed is None else int(allowed[index])


def threshold(scores: Tensor, record: _Record, largest: float) -> float:
    """The logit from which on a token is kept by min-p, top-k and top-p, each on what the last one left; all of equals."""
    inverse_temperature = record.floats[t.INVERSE_TEMPERATURE]
    lowest = float(scores.new_tensor(largest) + record.floats[t.MIN_P_MARGIN])  # rounded like a logit
    top_k, top_p = record.words[t.TOP_K], record.floats[t.TOP_P]
    if not top_k and top_p >= 1.0:
        return lowest
    values = _ascending(scores)
    if top_k:
        lowest = max(lowest, float(values[-min(top_k, len(values))]))
    if top_p >= 1.0:
        return lowest
    values = values[int(torch.searchsorted(values, lowest)) :].flip(0)
    masses = torch.exp((values - largest) * inverse_temperature).cumsum(0, dtype=torch.float64)
    # The first that reaches the wanted mass is the last one kept.
    last = int(torch.searchsorted(masses, top_p * masses[-1]))
    return float(values[min(last, len(values) - 1)])


def _ascending(scores: Tensor) -> Tensor:
    if scores.is_cuda:
        return scores.sort().values
    return torch.from_numpy(np.sort(scores.numpy()))  # thirty times as fast as torch's, whose sort carries indices
