"""KV cache: the tensors behind block ids, one key and one value tensor per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kv.layout import KVLayout, LayerShape


@dataclass(frozen=True, slots=True)
class LayerKV:
    """`k` and `v`: [num_blocks, num_kv_heads, block_size, head_size]. A block of one head is contiguous: what attention streams.
    Where values are part of the keys, `v` is `k`."""

    k: torch.Tensor
    v: torch.Tensor


class KVCache:
    """Memory is reserved, not touched: on a CPU a block costs resident memory when it is first written."""

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        def empty(layer: LayerShape) -> torch.Tensor:
            shape = (num_blocks, layer.num_kv_heads, layout.block_size, layer.head_size)
            return torch.empty(shape, dtype=dtype, device=device)

        self.layers: list[LayerKV] = []
        for layer in layout.layers:
            keys = empty(layer)
            self.layers.append(LayerKV(keys, keys if layer.latent else empty(layer)))
