"""Sampling tables filled by hand, for tests of the op: one row per wish, in the words of a client."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ops.sampling import tables as t
from ops.sampling.tables import SamplingTables

MAX_BIASES, MAX_BANS = 8, 5


@dataclass(frozen=True)
class Wish:
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    bans: tuple[int, ...] = ()
    free_from: int = 0
    allowed: tuple[int, ...] | None = None


def fill(wishes: list[Wish], vocab_size: int, device: str = "cpu") -> SamplingTables:
    tables = SamplingTables.empty(len(wishes), vocab_size, MAX_BIASES, MAX_BANS, torch.device("cpu"))
    for row, wish in enumerate(wishes):
        _write(tables, row, wish)
    names = ("records", "counts", "bias_ids", "bias_values", "ban_ids", "masks")
    return SamplingTables(**{name: getattr(tables, name).to(device) for name in names})


def _write(tables: SamplingTables, row: int, wish: Wish) -> None:
    words = tables.records[row]
    floats = words.view(torch.float32)
    flags = 0
    if wish.temperature:
        flags |= t.SAMPLED
        filtered = wish.top_k or wish.top_p < 1.0 or wish.min_p
        flags |= t.FILTERED if filtered else 0
        floats[t.INVERSE_TEMPERATURE] = 1.0 / wish.temperature
        words[t.TOP_K] = wish.top_k
        floats[t.TOP_P] = wish.top_p
        floats[t.MIN_P_MARGIN] = wish.temperature * math.log(wish.min_p) if wish.min_p else -math.inf
        seed = torch.tensor([wish.seed], dtype=torch.int64).view(torch.int32)
        words[t.SEED_LOW], words[t.SEED_HIGH] = seed.unbind()
    if wish.presence or wish.frequency or wish.repetition != 1.0:
        flags |= t.PENALIZED
        floats[t.PRESENCE], floats[t.FREQUENCY] = wish.presence, wish.frequency
        floats[t.REPETITION], floats[t.INVERSE_REPETITION] = wish.repetition, 1.0 / wish.repetition
        for token in wish.outputs:
            tables.counts[row, token] += 1
        for token in set(wish.prompt):
            tables.counts[row, token] += -0x8000
    if wish.bias:
        flags |= t.BIASED
        words[t.NUM_BIASES] = len(wish.bias)
        for index, (token, value) in enumerate(sorted(wish.bias.items())):
            tables.bias_ids[row, index] = token
            tables.bias_values[row, index] = value
    if wish.bans:
        flags |= t.BANNED
        words[t.NUM_BANS] = len(wish.bans)
        words[t.FREE_FROM] = wish.free_from
        tables.ban_ids[row, : len(wish.bans)] = torch.tensor(sorted(wish.bans))
    if wish.allowed is not None:
        flags |= t.MASKED
        for token in wish.allowed:
            bit = token % 32
            tables.masks[row, token // 32] |= -(1 << 31) if bit == 31 else 1 << bit
    words[t.FLAGS] = flags
