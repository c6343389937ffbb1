"""Calibration: computes for each matrix the sum of x^T x over its inputs x while a model reads texts. GPTQ needs these sums.

The model runs in float32 and computes each text in one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import ops
from runtime.config import CACHE_TYPES
from runtime.kv.kv_cache import KVCache
from runtime.kv.layout import KVLayout
from runtime.models.blocks.weights import Weights
from runtime.models.decoder import Decoder
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.warmup import prompts


class WatchedLinear(ops.LinearWeight):
    """Linear layer for calibration. Inside `watching`, `gram` [K, K] float32 is the sum of x^T x over its inputs x; otherwise it is
    None."""

    def __init__(self, weight: ops.LinearWeight) -> None:
        self.out_features, self.in_features, self.nbytes = weight.out_features, weight.in_features, weight.nbytes
        self._weight = weight
        self.gram: Tensor | None = None

    def matmul(self, x: Tensor) -> Tensor:
        if self.gram is not None:
            self.gram.addmm_(x.float().T, x.float())
        return ops.linear(x, self._weight)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight.rows(ids)

    def refill(self, stored: ops.Stored) -> bool:
        return self._weight.refill(stored)


def watched(weights: Weights, names: Iterable[str]) -> tuple[Weights, dict[str, WatchedLinear]]:
    """Return (`weights` with the named linear layers replaced by `WatchedLinear`, these layers by name)."""
    found = {name: WatchedLinear(weights.linears[name]) for name in names}
    return weights._replace(linears={**weights.linears, **found}), found


@contextmanager
def watching(linears: Mapping[str, WatchedLinear]) -> Iterator[None]:
    """Context manager in which the layers accumulate their `gram`. At its end `gram` is dropped."""
    for linear in linears.values():
        linear.gram = torch.zeros(linear.in_features, linear.in_features)
    try:
        yield
    finally:
        for linear in linears.values():
            linear.gram = None


@torch.inference_mode()
def read_text(decoder: Decoder, ids: Sequence[int], kv_cache_dtype: str | None = None) -> Tensor:
    """Return the logits [T, V] of a text, computed in one step on a CPU. `kv_cache_dtype`: value of the option; by default the
    dtype of activations."""
    kinds = tuple(kind.with_dtype(CACHE_TYPES[kv_cache_dtype or decoder.dtype]) for kind in decoder.spec.memory_kinds())
    layout, count = KVLayout.of(kinds), len(ids)
    num_blocks = layout.max_blocks(count + 1, count + 1)
    cache = KVCache(layout, num_blocks, torch.device(decoder.device))
    batch = prompts([count], layout, num_blocks)
    row = batch.rows[0]._replace(token_ids=tuple(ids))
    step = InputBuffers(1, count + 1, layout, cache.layers).fill((row,)).forward
    return decoder.compute_logits(decoder.forward(step))
