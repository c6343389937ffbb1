"""KV cache: the tensors that contain the blocks of the block pool. Each tensor has a page of every block.

Layers of different groups share a tensor. Only the block tables show to which group a block belongs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kv.kinds import AttentionKVSpec, MemoryKind, Nothing, RecurrentStateSpec, State
from runtime.kv.layout import KVLayout, LayerPlacement


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Tensors of the KV cache or recurrent state of one layer.

    - Attention: keys and values, [num_blocks, num_kv_heads, block_size, head_size] each. A block of one head is contiguous. If
      the cache has scales, the last dimension is longer by `scale_bytes`. If values are a part of the keys, both are one tensor.
    - Recurrent: tensors of the state, [num_blocks, *shape] float32. Only a single block is contiguous.
    - Without memory: no tensors.

    `table`: index of the layer's block table among the step's tables."""

    tensors: tuple[torch.Tensor, ...]
    table: int = 0


class KVCache:
    """KV cache of all layers. Memory is allocated but not written: on a CPU, a block becomes resident when it is first written."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self._layout = layout
        self._kv_tensors = [
            torch.empty(num_blocks * layout.page_bytes, dtype=torch.uint8, device=device)
            for _ in range(layout.num_kv_tensors)
        ]
        # Blocks are moved in the widest words that fit: eight times as fast as by bytes.
        words = torch.int64 if layout.page_bytes % 8 == 0 else torch.uint8
        self._pages = [
            tensor.view(words).view(num_blocks, layout.page_bytes // words.itemsize) for tensor in self._kv_tensors
        ]
        self.layers = [
            LayerKV(self._tensors(kind, placement), placement.table)
            for kind, placement in zip(layout.kinds, layout.placements, strict=True)
        ]

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks `sources` to blocks `targets`, both ids [N] int64 on the cache's device. All are read before any is
        written."""
        for pages in self._pages:
            pages[targets] = pages[sources]

    def read_blocks(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Return the bytes of blocks `block_ids` [N] int64 as a tensor [N, block_bytes] uint8, on the cache's device."""
        read = torch.stack([pages[block_ids] for pages in self._pages], 1)
        return read.view(len(block_ids), -1).view(torch.uint8)

    def write_blocks(self, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write `blocks` [N, block_bytes] uint8, as returned by `read_blocks`, to blocks `block_ids` [N] int64. No step may use
        these blocks."""
        written = blocks.view(len(block_ids), len(self._kv_tensors), -1)
        for number, pages in enumerate(self._pages):
            pages[block_ids] = written[:, number].view(pages.dtype)

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    def _tensors(self, kind: MemoryKind, placement: LayerPlacement) -> tuple[torch.Tensor, ...]:
        match kind:
            case Nothing():
                return ()
            case State(state):
                return self._state(state, placement)
            case _:
                keys, *values = (self._blocks(kind.kv, placement, number) for number in placement.kv_tensors)
                return keys, *(values or [keys])

    def _blocks(self, kv: AttentionKVSpec, placement: LayerPlacement, number: int) -> torch.Tensor:
        """Return the keys or the values of one layer, divided into blocks of the kernels' size. A block of the pool contains
        `placement.num_sub_slots` of them or more."""
        shape = kv.num_kv_heads, self._layout.kernel_block_size, kv.elements
        dtype = getattr(torch, kv.known_dtype.name)
        return self._kv_tensors[number].view(dtype).view(-1, *shape)[placement.sub_slot :]

    def _state(self, state: RecurrentStateSpec, placement: LayerPlacement) -> tuple[torch.Tensor, ...]:
        states = self._kv_tensors[placement.kv_tensors[0]].view(-1, self._layout.page_bytes)
        start = placement.sub_slot * state.num_bytes
        tensors = []
        for shape, offset in zip(state.shapes, state.offsets, strict=False):
            size = 4 * torch.Size(shape).numel()
            flat = states[:, start + offset : start + offset + size].view(torch.float32)
            tensors.append(flat.view(-1, *shape))
        return tuple(tensors)
