"""Sampling in plain torch: row by row, except for rows that take their largest logit. Supports any float dtype.

It reads the tables on the host, so on a CUDA device it waits for every row. It is the baseline there, and the implementation on a
CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ops.sampling import tables as t
from ops.sampling.noise import gumbel, noise_keys
from ops.sampling.tables import Drafts, Masks, SamplingTables

LARGEST = torch.finfo(torch.float32).max
_LEAST_MASSES = 0.02, 3e-4, 5e-6  # shares of the largest probability: tokens above them are examined first
# [256, 8] float32: 0 or -inf for the eight tokens of a mask byte.
_LIMITS = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, torch.inf, -torch.inf)


def sample(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor, tables: SamplingTables,
    drafts: Drafts | None = None, masks: Masks | None = None,
) -> Tensor:  # fmt: skip
    ids = draw(logits, sample_rows, sample_positions, tables, None if drafts is None else drafts.ids, masks)
    if drafts is None:
        note(ids, sample_rows, last_ids)
    else:
        accept(ids, sample_rows, last_ids, drafts)
    return ids


def draw(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, tables: SamplingTables, guesses: Tensor | None,
    masks: Masks | None,
) -> Tensor:  # fmt: skip
    """Return the sampled ids and update the rows' counts; a row's ids after its first mismatching draft may be NOT_FINITE."""
    rows = sample_rows.tolist()
    row_index = sample_rows.long()
    flags = tables.records[row_index, t.FLAGS].tolist()
    special = [index for index, row in enumerate(rows) if row >= 0 and flags[index]]
    if len(special) < len(rows):
        largest, ids = logits.max(dim=-1)  # the first of several; NaN counts as the largest
        ids.masked_fill_(~largest.isfinite(), t.NOT_FINITE)
    else:
        ids = torch.empty_like(row_index)
    behind = [-1] * len(rows) if guesses is None else guesses.tolist()
    drawn: dict[int, int] = {}
    for index in special:
        if behind[index] < 0 or behind[index] == drawn.get(index - 1):
            mask = tables.masks[rows[index]] if masks is None else masks.words[int(masks.rows[index])]
            drawn[index] = _sample_one(logits[index], rows[index], int(sample_positions[index]), tables, mask)
        ids[index] = drawn.get(index, t.NOT_FINITE)
    return ids


def note(ids: Tensor, sample_rows: Tensor, last_ids: Tensor) -> None:
    """Store the id that each row sampled as its next input."""
    row_index, inputs = sample_rows.long(), ids.clamp(min=0)  # NOT_FINITE is not a valid input
    sampling = row_index >= 0
    if not sampling.all():
        row_index, inputs = row_index[sampling], inputs[sampling]
    last_ids[row_index] = inputs


def accept(ids: Tensor, sample_rows: Tensor, last_ids: Tensor, drafts: Drafts) -> None:
    """Store each row's last accepted id as its next input, and subtract rejected drafts from `drafts.num_computed`."""
    drawn, rows, behind = ids.tolist(), sample_rows.tolist(), drafts.ids.tolist()
    for first, (row, guess) in enumerate(zip(rows, behind, strict=True)):
        if row < 0 or guess >= 0:
            continue
        stop = first + 1
        while stop < len(rows) and behind[stop] >= 0:
            stop += 1
        last = first
        while last + 1 < stop and rows[last + 1] >= 0 and behind[last + 1] == drawn[last]:
            last += 1
        last_ids[row] = max(drawn[last], 0)
        drafts.num_computed[row] -= stop - 1 - last


@dataclass(frozen=True, slots=True)
class _Record:
    words: list[int]
    floats: list[float]  # the same bits


def _sample_one(logits: Tensor, row: int, position: int, tables: SamplingTables, mask: Tensor) -> int:
    """Return the id sampled from logits [V], NOT_FINITE if they are unusable."""
    words = tables.records[row]
    record = _Record(words.tolist(), words.view(torch.float32).tolist())
    flags = record.words[t.FLAGS]
    scores = logits.to(torch.float32, copy=True)
    adjust(scores, record, position, row, tables, mask)
    largest, chosen = (float(value) for value in scores.max(dim=-1))
    if not -torch.inf < largest < torch.inf:
        return t.NOT_FINITE
    drawn = _draw(scores, record, position, largest) if flags & t.SAMPLED else int(chosen)
    if flags & t.PENALIZED:
        count = tables.counts[row, drawn]
        count += (count & t.MAX_COUNT) < t.MAX_COUNT
    return drawn


def adjust(scores: Tensor, record: _Record, position: int, row: int, tables: SamplingTables, mask: Tensor) -> None:
    """Apply penalties, bias, bans and mask, in this order, to scores [V] float32 in place."""
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
        # By whole bytes, and with a minimum: filling by a boolean mask takes eight times as long.
        limits = _LIMITS.to(scores.device).index_select(0, mask.view(torch.uint8).int())
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
    else:  # a huge logit over a small temperature must not become infinite
        scaled = (scores * record.floats[t.INVERSE_TEMPERATURE]).clamp_(-LARGEST, LARGEST)
        perturbed.add_(torch.where(scores == -torch.inf, scores, scaled))
    index = int(perturbed.max(dim=-1).indices)
    return index if allowed is None else int(allowed[index])


def threshold(scores: Tensor, record: _Record, largest: float) -> float:
    """Return the smallest logit kept by min-p, top-k and top-p, each applied to the tokens left by the last; ties are kept."""
    inverse_temperature = record.floats[t.INVERSE_TEMPERATURE]
    lowest = float(scores.new_tensor(largest) + record.floats[t.MIN_P_MARGIN])  # rounded like a logit
    top_k, top_p = record.words[t.TOP_K], record.floats[t.TOP_P]
    if not top_k and top_p >= 1.0:
        return lowest
    if top_k:
        lowest = max(lowest, _kth_largest(scores, top_k))
    if top_p >= 1.0:
        return lowest
    masses = torch.exp((scores - largest) * inverse_temperature)
    if lowest > -torch.inf:
        masses.masked_fill_(scores < lowest, 0.0)
    total = float(masses.sum(dtype=torch.float64))
    is_flat = total > len(scores) / 16  # so many tokens are needed that sorting all is as fast as finding them
    values = _descending(scores if is_flat else scores[_likeliest(masses, top_p * total).nonzero()[:, 0]])
    reached = torch.exp((values - largest) * inverse_temperature).cumsum(0, dtype=torch.float64)
    # The first one that reaches the wanted mass is the last to keep.
    last = int(torch.searchsorted(reached, top_p * total))
    return float(values[min(last, len(values) - 1)])


def _likeliest(masses: Tensor, wanted: float) -> Tensor:
    """Return a mask [V] bool of the tokens with the largest `masses` [V], so many that they together exceed `wanted`. Only these
    need to be sorted. The largest mass is 1."""
    for least in _LEAST_MASSES:
        likely = masses >= least
        if float((masses * likely).sum(dtype=torch.float64)) > wanted:
            return likely
    return masses > 0


def _kth_largest(scores: Tensor, k: int) -> float:
    k = min(k, len(scores))
    if scores.is_cuda:
        return float(scores.topk(k).values[-1])
    return float(np.partition(scores.numpy(), len(scores) - k)[len(scores) - k])  # takes a third of torch's time


def _descending(scores: Tensor) -> Tensor:
    if scores.is_cuda:
        return scores.sort(descending=True).values
    return torch.from_numpy(-np.sort(-scores.numpy()))  # thirty times as fast as torch, whose sort also returns indices
