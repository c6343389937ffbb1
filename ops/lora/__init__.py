"""LoRA for a batch in which each token has its own adapter; tokens without an adapter cost nothing.

On a CPU, adapters are packed like weights, and adjacent tokens with one adapter are multiplied together. On a device, all slots of
a layer are in two tensors, and tokens are sorted by slot once per step. Two kernels serve all adapters and parts of a layer: shrink
(x A^T), then, after the weight's product, expand (B^T) (Chen et al., "Punica", 2023; Sheng et al., "S-LoRA", 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from ops import backends
from ops.lora import native, reference
from ops.lora.embedding import DeviceTables, EmbeddingSlots, EmbeddingTables, columns
from ops.lora.share import LoraShape, LoraSlots, TokenAdapters
from ops.registry import USUAL, Kernel, Op

_prepare_lora = Op(
    "lora",
    USUAL,
    [
        backends.native("lora", native.NativeLoraSlots),
        Kernel("lora", "triton", backends.on_cuda_at_any_size, "ops.lora.triton_lora:prepare"),
        backends.reference("lora", reference.ReferenceLoraSlots),
    ],
)
_index = Op(
    "lora_index",
    USUAL,
    [
        Kernel("lora_index", "triton", backends.on_cuda_at_any_size, "ops.lora.triton_index:index"),
        backends.reference("lora_index", lambda slots, num_slots: TokenAdapters(slots)),
    ],
)


def prepare_lora(shape: LoraShape, dtype: torch.dtype, device: torch.device) -> LoraSlots:
    """Allocate slots for one layer's adapters in the form that the chosen kernel reads. `dtype`: dtype of activations."""
    made: LoraSlots = _prepare_lora.runs[device, dtype](shape, dtype, device)
    return made


def prepare_embedding_lora(shape: LoraShape, dtype: torch.dtype, device: torch.device) -> EmbeddingSlots:
    """Allocate slots for the adapters of an embedding [V, H]; `shape` is that of its transpose. Inputs are ids [T] int64."""
    of_rows = shape._replace(in_features=columns(shape.max_rank))
    expands = prepare_lora(of_rows, dtype, device)
    return DeviceTables(shape, expands, dtype) if expands.slot_bytes else EmbeddingTables(shape, expands)


def index_adapters(slots: Tensor, num_slots: int) -> TokenAdapters:
    """Group a step's tokens by adapter for all layers. slots [T] int32, each below `num_slots`, -1 for none."""
    found: TokenAdapters = _index.runs[slots.device, torch.float32](slots, num_slots)
    return found
