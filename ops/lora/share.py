"""A LoRA adapter's change of one linear layer (its share), and the slots in which a layer stores the shares of several adapters.

A layer's outputs consist of parts (q, k and v; gate and up). An adapter changes some of them: out[start ...] += scale * (x A^T) B^T
(Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021). Each step assigns slots to tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ops.gemm.low_rank import LowRank
from ops.symbols import NotTraceable, Symbol


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Change of one part of a layer: a [r, K] and b [n, r] on the CPU, in their stored dtype. The product is multiplied by
    `scale` and added to the outputs from `start` on."""

    start: int
    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


class LoraShape(NamedTuple):
    """Layer [out_features, in_features] with slots for `num_slots` adapters. `parts`: number of outputs of each part; one part
    unless the layer is merged. `max_rank`: maximum rank in a part. `bits`: number of bits that suffice per number, 32, 16 or 8.
    `of_expert`: the layer is a matrix of an expert, which `ops.moe` multiplies."""

    out_features: int
    in_features: int
    parts: tuple[int, ...]
    num_slots: int
    max_rank: int
    bits: int = 32
    of_expert: bool = False


class TokenAdapters(NamedTuple):
    """Adapters of a step's tokens. slots [T] int32: slot of each token, -1 for none.

    The other fields are for device kernels (`triton_index.py`), else None. order [T] int32: token indices sorted by slot, those
    without an adapter last. tiles [3, M] int32: the slot of each tile (-1 for none), its first index in `order`, and the end of its
    slot's tokens. used [2] int32: number of tiles with an adapter, which come first, and number of all tiles."""

    slots: Tensor
    order: Tensor | None = None
    tiles: Tensor | None = None
    used: Tensor | None = None


class LoraSlots(ABC):
    """Slots for the shares of one layer. `nbytes`: memory allocated for all slots, used or not. `slot_bytes`: bytes of a slot in
    the memory that all layers share (`LoraLayers`); 0 if the layer stores its own slots."""

    nbytes = 0
    slot_bytes = 0

    def __init__(self, shape: LoraShape) -> None:
        self.shape = shape

    @abstractmethod
    def prepared(self, parts: Sequence[LoraPart]) -> Any:
        """Return a share for `put`. Slow, without side effects, and callable on any thread."""

    @abstractmethod
    def put(self, slot: int, share: Any | None) -> None:
        """Load a share into `slot` from the next step on; None if the adapter does not change this layer. Call it in the order of
        steps."""

    def bind(self, memory: Tensor) -> None:
        """Use memory [num_slots, slot_bytes] uint8 of zeros for the slots; rows may be any distance apart."""
        raise NotImplementedError

    def write(self, parts: Sequence[LoraPart], memory: Tensor) -> None:
        """Write a share in a slot's layout to zeroed host memory [slot_bytes] uint8. Callable like `prepared`."""
        raise NotImplementedError

    def begin(self, x: Tensor, adapters: TokenAdapters) -> Any:
        """Enqueue work that depends on x only, before or in parallel with the weight's product. Return the argument `begun` of
        later calls; None if this is not faster."""
        return None

    def low_rank(self, x: Tensor, adapters: TokenAdapters, *, gated: bool) -> LowRank | None:
        """Enqueue work that depends on x only, for a product that adds the adapters at its end. Returns None, with nothing
        enqueued, if this layer has no such product."""
        return None

    @abstractmethod
    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        """Add each row's adapter product of x [T, K] to out [T, N]. T may be 0."""

    def gated(self, x: Tensor, adapters: TokenAdapters, gate_up: Tensor, begun: Any = None) -> Tensor | None:
        """Add adapters to gate_up [T, N]; return silu(first half) * second half [T, N / 2], if one kernel does both, else None."""
        return None

    def trace(self, x: Symbol, out: Symbol) -> None:
        raise NotTraceable("these adapters are added by no compiled stack")
