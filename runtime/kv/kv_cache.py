"""KV cache: the tensors behind block ids, one for each column of a block.

Layers of different groups share a column: which of them a block belongs to, only the block tables tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kv.layout import KVLayout, LayerPlace, LayerShape, MemoryShape, StateShape


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV cache of one layer, or its recurrent state.

    Of attention keys and values, [num_blocks, num_kv_heads, block_size, head_size] each: a block of one head is contiguous,
    which is what attention streams; a cache with scales is wider by the layout's `scale_bytes`. Where values are part of the
    keys, they are the same tensor. Of a recurrent layer its state's tensors, [num_blocks, *shape] float32, of which only a block
    is contiguous. `table`: which of a step's block tables tells which blocks are this layer's."""

    tensors: tuple[torch.Tensor, ...]
    table: int = 0


class KVCache:
    """Memory is reserved, not touched: on a CPU a block costs resident memory when it is first written."""

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._columns = [
            torch.empty(num_blocks * layout.column_bytes, dtype=torch.uint8, device=device)
            for _ in range(layout.num_columns)
        ]
        self.layers = [
            self._memory(layer, place, dtype) for layer, place in zip(layout.layers, layout.places, strict=True)
        ]

    def _memory(self, layer: MemoryShape, place: LayerPlace, dtype: torch.dtype) -> LayerKV:
        if isinstance(layer, StateShape):
            return LayerKV(self._state(layer, place), place.table)
        keys, *values = (self._blocks(layer, place, column, dtype) for column in place.columns)
        return LayerKV((keys, *(values or [keys])), place.table)

    def _blocks(self, layer: LayerShape, place: LayerPlace, column: int, dtype: torch.dtype) -> torch.Tensor:
        """Blocks of one layer as kernels count them, of which `place.parts` or more lie in one of the pool's."""
        line = layer.head_size + self._layout.scale_bytes // dtype.itemsize
        shape = layer.num_kv_heads, self._layout.kernel_block_size, line
        return self._columns[column].view(dtype).view(-1, *shape)[place.part :]

    def _state(self, state: StateShape, place: LayerPlace) -> tuple[torch.Tensor, ...]:
        slots = self._columns[place.columns[0]].view(-1, self._layout.column_bytes)
        start = place.part * state.num_bytes
        tensors = []
        for shape, offset in zip(state.shapes, state.offsets, strict=False):
            size = 4 * torch.Size(shape).numel()
            flat = slots[:, start + offset : start + offset + size].view(torch.float32)
            tensors.append(flat.view(-1, *shape))
        return tuple(tensors)
