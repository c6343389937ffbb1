"""Operations of a forward pass: one function per op, with the same signature for every backend.

T: tokens in a step, of all sequences; R: rows (sequences); H: hidden size; D: head size. Each op has a folder. Its __init__.py has
the signature and the list of kernels: a torch reference and faster kernels. registry.py chooses a kernel once per shape class. This
file lists the public ops. They know tensors only, no requests and no models.

On the native CPU path, a token's result is bitwise independent of the other tokens and rows in the step, of how its prompt was
chunked, and of the number of threads."""

from __future__ import annotations

from ops.activation import activate, gated, silu_mul
from ops.attention import attend, attend_blocks, attend_latent, attend_packed, cache_refusal, paged_attention
from ops.attention.heads import AttentionHeads, LatentHeads
from ops.attention.meta import AttentionMeta, across, caches_stand_for, in_chunks, max_pieces
from ops.attention.reference import TokenBlock
from ops.conv import causal_conv
from ops.delta import gated_delta_rule
from ops.delta.reference import DeltaHeads
from ops.embedding import embedding
from ops.gemm import (
    activated_linear,
    embedding_refusal,
    gated_linear,
    gated_mlp,
    linear,
    linear_by_head,
    linear_refusal,
    normed_for,
    prepare_heads,
    prepare_linear,
)
from ops.gemm.by_head import HeadsWeight
from ops.gemm.dequantize import apart, dequantize, round_to_fp8, round_to_w4
from ops.gemm.rounded import RoundedRows
from ops.gemm.weight import LinearWeight, read_in_turn
from ops.inputs import place_behind, place_tokens, unpack
from ops.inputs.reference import StepTensors
from ops.kv import store_kv
from ops.lookup import look_up
from ops.lora import index_adapters, prepare_embedding_lora, prepare_lora
from ops.lora.layers import LoraLayers, PreparedLora
from ops.lora.share import LoraPart, LoraShape, LoraSlots, TokenAdapters
from ops.moe import count_experts, moe, moe_refusal, prepare_experts
from ops.moe.weights import ExpertShape, ExpertWeights, Routing
from ops.norm import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, layer_norm_of_sum, rms_norm
from ops.registry import describe, force
from ops.rope import rope
from ops.sampling import sample
from ops.scan import selective_scan, state_space_scan
from ops.scan.reference import ScanHeads
from ops.segment import segment_mean
from ops.start import compile_ahead, compile_together, native_isa, set_num_threads
from ops.stored import Stored, StoredWeight, WeightFormat
from ops.symbols import NotTraceable
from ops.tracing import CompiledStack, StepSymbols, Tracer, can_trace

__all__ = [
    "AttentionHeads",
    "AttentionMeta",
    "CompiledStack",
    "DeltaHeads",
    "ExpertShape",
    "ExpertWeights",
    "HeadsWeight",
    "LatentHeads",
    "LinearWeight",
    "LoraLayers",
    "LoraPart",
    "LoraShape",
    "LoraSlots",
    "NotTraceable",
    "PreparedLora",
    "RoundedRows",
    "Routing",
    "ScanHeads",
    "StepSymbols",
    "StepTensors",
    "Stored",
    "StoredWeight",
    "TokenAdapters",
    "TokenBlock",
    "Tracer",
    "WeightFormat",
    "across",
    "activate",
    "activated_linear",
    "add_layer_norm",
    "add_rms_norm",
    "apart",
    "attend",
    "attend_blocks",
    "attend_latent",
    "attend_packed",
    "cache_refusal",
    "caches_stand_for",
    "can_trace",
    "causal_conv",
    "compile_ahead",
    "compile_together",
    "count_experts",
    "dequantize",
    "describe",
    "embedding",
    "embedding_refusal",
    "force",
    "gated",
    "gated_delta_rule",
    "gated_linear",
    "gated_mlp",
    "gated_rms_norm",
    "in_chunks",
    "index_adapters",
    "layer_norm",
    "layer_norm_of_sum",
    "linear",
    "linear_by_head",
    "linear_refusal",
    "look_up",
    "max_pieces",
    "moe",
    "moe_refusal",
    "native_isa",
    "normed_for",
    "paged_attention",
    "place_behind",
    "place_tokens",
    "prepare_embedding_lora",
    "prepare_experts",
    "prepare_heads",
    "prepare_linear",
    "prepare_lora",
    "read_in_turn",
    "rms_norm",
    "rope",
    "round_to_fp8",
    "round_to_w4",
    "sample",
    "segment_mean",
    "selective_scan",
    "set_num_threads",
    "silu_mul",
    "state_space_scan",
    "store_kv",
    "unpack",
]
