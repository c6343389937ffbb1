"""Changes of an adapter to one linear layer, and the slots in which a layer keeps those of several adapters.

A layer's outputs are parts (q, k and v; gate and up), of which an adapter changes some: out[start ...] += scale * (x A^T)
B^T (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021). Each step says which token uses which slot."""

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
    """One part of a layer: a [r, K], b [n, r], on the CPU, in the type that they were stored in; what they add begins at output
    `start`, and is multiplied by `scale`."""

    start: int
    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


class LoraShape(NamedTuple):
    """A layer [out_features, in_features] with room for the shares of `num_slots` adapters. `parts`: the outputs of each of its
    parts, one for a layer that is not merged; `max_rank`: of a part. `bits`: 32, 16 or 8, so many of a
    number are enough. `of_expert`: it is one
    matrix of one expert, which `ops.moe` multiplies by."""

    out_features: int
    in_features: int
    parts: tuple[int, ...]
    num_slots: int
    max_rank: int
    bits: int = 32
    of_expert: bool = False


class TokenAdapters(NamedTuple):
    """A step's T tokens by adapter. slots [T] int32: whose share each takes, -1 for none.

    The same for kernels of a device (`triton_index.py`), None elsewhere. order [T] int32: the tokens by slot, those without last.
    tiles [3, M] int32: the slot of each, -1 for none; the places in that order where it begins and where its slot's tokens end.
    used [2] int32: how many there are with an adapter, which come first, and how many in all."""

    slots: Tensor
    order: Tensor | None = None
    tiles: Tensor | None = None
    used: Tensor | None = None


class LoraSlots(ABC):
    """The shares of one layer, by slot. `nbytes`: of what is allocated whether a slot is used or not. `slot_bytes`: what a slot
    takes of memory that all layers have in common (`LoraLayers`); 0: it keeps its slots itself."""

    nbytes = 0
    slot_bytes = 0

    def __init__(self, shape: LoraShape) -> None:
        self.shape = shape

    @abstractmethod
    def prepared(self, parts: Sequence[LoraPart]) -> Any:
        """A share as `put` takes it. Takes long, changes nothing, and may be called on any thread."""

    @abstractmethod
    def put(self, slot: int, share: Any | None) -> None:
        """Put a share into `slot` from the next step on; None for an adapter that does not change this layer. Call in the
        order of steps."""

    def bind(self, memory: Tensor) -> None:
        """Have the slots in memory [num_slots, slot_bytes] uint8 of zeros, whose rows may be far from each other."""
        raise NotImplementedError

    def write(self, parts: Sequence[LoraPart], memory: Tensor) -> None:
        """A share as it lies in a slot, into memory [slot_bytes] uint8 of the host, which are zeros. As `prepared`."""
        raise NotImplementedError

    def begin(self, x: Tensor, adapters: TokenAdapters) -> Any:
        """Enqueue what hangs on x alone, before the weight's own product or beside it: `begun` of what comes behind that. None
        where nothing is gained by it."""
        return None

    def low_rank(self, x: Tensor, adapters: TokenAdapters, *, gated: bool) -> LowRank | None:
        """Enqueue what hangs on x alone, for a product that adds the rest where it ends. None, and nothing enqueued, where there
        is no such product of this layer."""
        return None

    @abstractmethod
    def add(self, x: Tensor, adapters: TokenAdapters, out: Tensor, begun: Any = None) -> None:
        """out [T, N] += what the adapter of each row of x [T, K] adds. T may be 0."""

    def gated(self, x: Tensor, adapters: TokenAdapters, gate_up: Tensor, begun: Any = None) -> Tensor | None:
        """silu of the first half of gate_up [T, N] + what adapters add, times the second, [T, N / 2], if one kernel does both."""
        return None

    def trace(self, x: Symbol, out: Symbol) -> None:
        raise NotTraceable("these adapters are added by no compiled stack")
