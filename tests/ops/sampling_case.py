"""Sampling tables filled by hand, for tests of the op: one row per set of parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ops.sampling import tables as t
from ops.sampling.tables import SamplingTables

MAX_BIASES, MAX_BANS = 8, 5


@dataclass(frozen=True)
class RowParams:
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


def fill(params_by_row: list[RowParams], vocab_size: int, device: str = "cpu") -> SamplingTables:
    tables = SamplingTables.empty(len(params_by_row), vocab_size, MAX_BIASES, MAX_BANS, torch.device("cpu"))
    for row, params in enumerate(params_by_row):
        _write(tables, row, params)
    names = ("records", "counts", "bias_ids", "bias_values", "ban_ids", "masks")
    return SamplingTables(**{name: getattr(tables, name).to(device) for name in names})


def _write(tables: SamplingTables, row: int, params: RowParams) -> None:
    words = tables.records[row]
    floats = words.view(torch.float32)
    flags = 0
    if params.temperature:
        flags |= t.SAMPLED
        filtered = params.top_k or params.top_p < 1.0 or params.min_p
        flags |= t.FILTERED if filtered else 0
        floats[t.INVERSE_TEMPERATURE] = 1.0 / params.temperature
        words[t.TOP_K] = params.top_k
        floats[t.TOP_P] = params.top_p
        floats[t.MIN_P_MARGIN] = params.temperature * math.log(params.min_p) if params.min_p else -math.inf
        seed = torch.tensor([params.seed], dtype=torch.int64).view(torch.int32)
        words[t.SEED_LOW], words[t.SEED_HIGH] = seed.unbind()
    if params.presence or params.frequency or params.repetition != 1.0:
        flags |= t.PENALIZED
        floats[t.PRESENCE], floats[t.FREQUENCY] = params.presence, params.frequency
        floats[t.REPETITION], floats[t.INVERSE_REPETITION] = params.repetition, 1.0 / params.repetition
        for token in params.outputs:
            tables.counts[row, token] += 1
        for token in set(params.prompt):
            tables.counts[row, token] += -0x8000
    if params.bias:
        flags |= t.BIASED
        words[t.NUM_BIASES] = len(params.bias)
        for index, (token, value) in enumerate(sorted(params.bias.items())):
            tables.bias_ids[row, index] = token
            tables.bias_values[row, index] = value
    if params.bans:
        flags |= t.BANNED
        words[t.NUM_BANS] = len(params.bans)
        words[t.FREE_FROM] = params.free_from
        tables.ban_ids[row, : len(params.bans)] = torch.tensor(sorted(params.bans))
    if params.allowed is not None:
        flags |= t.MASKED
        for token in params.allowed:
            bit = token % 32
            tables.masks[row, token // 32] |= -(1 << 31) if bit == 31 else 1 << bit
    words[t.FLAGS] = flags
