"""KV cache: the tensors behind block ids, one of keys and one of values for each column of a block.

Layers of different groups share a column: which of them a block belongs to, only the block tables tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kv.layout import KVLayout, LayerPlace, LayerShape


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Keys and values, [num_blocks, num_kv_heads, block_size, head_size] each: a block of one head is contiguous, which is what
    attention streams. Where values are part of the keys, they are the same tensor. `table`: which of a step's block tables
    tells which blocks are this layer's."""

    tensors: tuple[torch.Tensor, ...]
    table: int = 0


class KVCache:
    """Memory is reserved, not touched: on a CPU a block costs resident memory when it is first written."""

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        def columns() -> list[torch.Tensor]:
            size = num_blocks * layout.block_size * layout.column_elements
            return [torch.empty(size, dtype=dtype, device=device) for _ in range(layout.num_columns)]

        def layer_of(column: torch.Tensor, layer: LayerShape, place: LayerPlace) -> torch.Tensor:
            """Blocks of one layer, of which `place.parts` lie in one of the column's."""
            shape = layer.num_kv_heads, layout.block_size, layer.head_size
            return column.view(-1, *shape)[place.part :]

        keys = columns()
        values = keys if layout.latent else columns()
        self.layers = [
            LayerMemory(
                (layer_of(keys[place.column], layer, place), layer_of(values[place.column], layer, place)), place.table
            )
            for layer, place in zip(layout.layers, layout.places, strict=True)
        ]
