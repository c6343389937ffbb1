"""KV layout: what one block holds in every layer, and what that costs in bytes. Numbers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens in a block


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer for one token: [num_kv_heads, head_size] each. `latent`: the values are part of the keys,
    and nothing else is stored."""

    num_kv_heads: int
    head_size: int
    latent: bool = False

    @property
    def num_elements(self) -> int:
        return (1 if self.latent else 2) * self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One entry per layer; `element_bytes` is the size of a cache element."""

    layers: tuple[LayerShape, ...]
    element_bytes: int
    block_size: int = BLOCK_SIZE

    @property
    def token_bytes(self) -> int:
        return sum(layer.num_elements for layer in self.layers) * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size
