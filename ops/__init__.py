"""The operations of a forward pass: one function each, the same call whatever computes it.

T tokens in a step (all sequences' tokens flattened), R rows (sequences), H hidden, D head size. Each op has a torch
reference and faster kernels beside it; registry.py chooses once per shape class. Tensors only: no request, no model.

On the native CPU path a token's result is bitwise independent of the other tokens and rows in the step, of how its
prompt was chunked, and of the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ops import native, recording
from ops.activation import native as activation_native
from ops.activation import reference as activation_reference
from ops.attention import native as attention_native
from ops.attention import reference as attention_reference
from ops.attention.heads import AttentionHeads
from ops.attention.latent import LatentHeads
from ops.attention.meta import FRESH_FROM, AttentionMeta
from ops.conv import reference as conv_reference
from ops.cuda import program as cuda_program
from ops.delta import reference as delta_reference
from ops.delta.heads import DeltaHeads
from ops.embedding import reference as embedding_reference
from ops.gemm import cuda as gemm_cuda
from ops.gemm import native as gemm_native
from ops.gemm import reference as gemm_reference
from ops.gemm.by_head import HeadsWeight, NativeHeadsWeight, ReferenceHeadsWeight
from ops.gemm.weight import BlockRows, LinearWeight
from ops.inputs import reference as inputs_reference
from ops.inputs.tensors import StepTensors
from ops.kv import native as kv_native
from ops.kv import reference as kv_reference
from ops.moe import native as moe_native
from ops.moe import reference as moe_reference
from ops.moe.routing import Routing
from ops.moe.weights import ClampedSwiglu, ExpertShape, ExpertWeights
from ops.norm import native as norm_native
from ops.norm import reference as norm_reference
from ops.recording import NotRecordable, Recorder, Recording, StepSymbols
from ops.registry import Kernel, Op, ShapeClass, describe, force, forced
from ops.rope import native as rope_native
from ops.rope import reference as rope_reference
from ops.sampling import native as sampling_native
from ops.sampling import reference as sampling_reference
from ops.sampling.tables import SamplingTables
from ops.scan import reference as scan_reference
from ops.scan.heads import ScanHeads

__all__ = [
    "FRESH_FROM",
    "AttentionHeads",
    "AttentionMeta",
    "BlockRows",
    "ClampedSwiglu",
    "DeltaHeads",
    "ExpertShape",
    "ExpertWeights",
    "HeadsWeight",
    "LatentHeads",
    "LinearWeight",
    "NotRecordable",
    "Recorder",
    "Recording",
    "Routing",
    "SamplingTables",
    "ScanHeads",
    "StepSymbols",
    "StepTensors",
    "activate",
    "add_layer_norm",
    "add_rms_norm",
    "attend",
    "attend_latent",
    "can_record",
    "causal_conv",
    "compile_ahead",
    "compile_together",
    "describe",
    "embedding",
    "force",
    "gated",
    "gated_delta_rule",
    "gated_linear",
    "gated_rms_norm",
    "layer_norm",
    "linear",
    "linear_by_head",
    "moe",
    "paged_attention",
    "prepare_experts",
    "prepare_heads",
    "prepare_linear",
    "rms_norm",
    "rope",
    "sample",
    "selective_scan",
    "set_num_threads",
    "silu_mul",
    "state_space_scan",
    "store_kv",
    "unpack",
]

_USUAL = ShapeClass("cpu", torch.float32)
_USUAL_ATTENTION = ShapeClass("cpu", torch.float32, torch.float32, 64)


def _any(case: ShapeClass) -> str | None:
    return None


def _on_cuda_at_any_size(case: ShapeClass) -> str | None:
    return None if case.device == "cuda" else f"it runs on CUDA, not on {case.device}"


def _on_cuda(case: ShapeClass) -> str | None:
    return _on_cuda_at_any_size(case) or (None if case.head_size <= 256 else "it serves head sizes up to 256")


def _op(
    name: str,
    native_run: Callable[..., Any],
    reference_run: Callable[..., Any],
    usual: ShapeClass = _USUAL,
    supports: Callable[[ShapeClass], str | None] = native.supports,
    triton_run: str | None = None,
    recorded_run: Callable[..., Any] | None = None,
) -> Op:
    kernels = [Kernel(name, "native", supports, native_run, native.about)]
    if triton_run is not None:
        kernels.append(Kernel(name, "triton", _on_cuda, triton_run))
    recorded = None if recorded_run is None else Kernel(name, "recorded", recording.supports, recorded_run)
    return Op(name, usual, [*kernels, Kernel(name, "reference", _any, reference_run)], recorded)


_prepare_linear = Op(
    "linear",
    _USUAL,
    [
        Kernel("linear", "native", native.supports, gemm_native.NativeLinearWeight, native.about),
        Kernel("linear", "cuda", gemm_cuda.supports, gemm_cuda.CudaLinearWeight),
        Kernel("linear", "reference", _any, gemm_reference.ReferenceLinearWeight),
    ],
)
_prepare_heads = Op(
    "linear_by_head",
    _USUAL,
    [
        Kernel("linear_by_head", "native", native.supports, NativeHeadsWeight, native.about),
        Kernel("linear_by_head", "reference", _any, ReferenceHeadsWeight),
    ],
)
_prepare_experts = Op(
    "moe",
    _USUAL,
    [
        Kernel("moe", "native", native.supports, moe_native.NativeExpertWeights, native.about),
        Kernel("moe", "triton", _on_cuda, "ops.moe.triton_experts:TritonExpertWeights"),
        Kernel("moe", "reference", _any, moe_reference.StackedExpertWeights),
    ],
)
_embedding = Op(
    "embedding",
    _USUAL,
    [
        Kernel("embedding", "triton", _on_cuda, "ops.embedding.triton_embedding:embedding"),
        Kernel("embedding", "reference", _any, embedding_reference.embedding),
    ],
)
_sample = Op(
    "sample",
    _USUAL,
    [
        Kernel("sample", "native", native.supports_sampling, sampling_native.sample, native.about),
        Kernel("sample", "triton", _on_cuda, "ops.sampling.triton_sample:sample"),
        Kernel("sample", "reference", _any, sampling_reference.sample),
    ],
)
_unpack = Op(
    "unpack",
    ShapeClass("cpu", torch.int32),
    [
        Kernel("unpack", "triton", _on_cuda, "ops.inputs.triton_unpack:unpack"),
        Kernel("unpack", "reference", _any, inputs_reference.unpack),
    ],
)
_rms_norm = _op(
    "rms_norm",
    norm_native.rms_norm,
    norm_reference.rms_norm,
    triton_run="ops.norm.triton_norm:rms_norm",
    recorded_run=recording.rms_norm,
)
_add_rms_norm = _op(
    "add_rms_norm",
    norm_native.add_rms_norm,
    norm_reference.add_rms_norm,
    triton_run="ops.norm.triton_norm:add_rms_norm",
    recorded_run=recording.add_rms_norm,
)
_layer_norm = _op(
    "layer_norm",
    norm_native.layer_norm,
    norm_reference.layer_norm,
    triton_run="ops.norm.triton_norm:layer_norm",
    recorded_run=recording.layer_norm,
)
_add_layer_norm = _op(
    "add_layer_norm",
    norm_native.add_layer_norm,
    norm_reference.add_layer_norm,
    triton_run="ops.norm.triton_norm:add_layer_norm",
    recorded_run=recording.add_layer_norm,
)
_rope = _op("rope", rope_native.rope, rope_reference.rope)
_store_kv = _op("store_kv", kv_native.store_kv, kv_reference.store_kv, _USUAL_ATTENTION)
_paged_attention = _op(
    "paged_attention",
    attention_native.paged_attention,
    attention_reference.paged_attention,
    _USUAL_ATTENTION,
    native.supports_attention,
    "ops.attention.triton_paged:paged_attention",
)
_silu_mul = _op(
    "silu_mul",
    activation_native.silu_mul,
    activation_reference.silu_mul,
    triton_run="ops.activation.triton_activation:silu_mul",
    recorded_run=recording.silu_mul,
)

_gated = _op(
    "gated",
    activation_native.gated,
    activation_reference.gated,
    triton_run="ops.activation.triton_activation:gated",
    recorded_run=recording.gated,
)
_activate = _op(
    "activate",
    activation_native.activate,
    activation_reference.activate,
    triton_run="ops.activation.triton_activation:activate",
    recorded_run=recording.activate,
)


def _torch_or(triton_run: str, name: str, reference_run: Callable[..., Any]) -> Op:
    """An op that no compiled kernel of ours computes."""
    kernels = [
        Kernel(name, "triton", _on_cuda_at_any_size, triton_run),
        Kernel(name, "reference", _any, reference_run),
    ]
    return Op(name, _USUAL, kernels)


_gated_rms_norm = _torch_or("ops.norm.triton_gated:gated_rms_norm", "gated_rms_norm", norm_reference.gated_rms_norm)
_causal_conv = _torch_or("ops.conv.triton_conv:causal_conv", "causal_conv", conv_reference.causal_conv)
_state_space_scan = _torch_or(
    "ops.scan.triton_scan:state_space_scan", "state_space_scan", scan_reference.state_space_scan
)
_selective_scan = _torch_or("ops.scan.triton_selective:selective_scan", "selective_scan", scan_reference.selective_scan)
_gated_delta_rule = _torch_or(
    "ops.delta.triton_delta:gated_delta_rule", "gated_delta_rule", delta_reference.gated_delta_rule
)


def prepare_linear(weight: Tensor, bias: Tensor | None = None, activations: torch.dtype | None = None) -> LinearWeight:
    """Bring weight [N, K] and bias [N] into the form the chosen kernel reads. Done once at load; the originals may be
    dropped afterwards. `activations`: the dtype that it will meet, if not its own; bias is of that dtype. Where there are
    `block_types`, float32 activations meet weights of 16 bits too."""
    return _prepare_linear.runs[weight.device, activations or weight.dtype](weight, bias)


def block_types(device: torch.device) -> frozenset[str]:
    """GGUF's block types that `prepare_block_linear` takes there; none where only references compute."""
    narrow = device.type == "cpu" and native.module is not None and forced() != "reference"
    return gemm_native.BLOCK_TYPES if narrow else frozenset()


def prepare_block_linear(parts: Sequence[BlockRows], bias: Tensor | None = None) -> LinearWeight:
    """The same for a weight whose rows stay quantised: parts of any of `block_types` with the same in_features, stacked."""
    return gemm_native.NativeBlockWeight(parts, bias)


def prepare_int8_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Round a float weight [N, K] to eight bits in blocks of 32 along K. Where `block_types` has "Q8_0".

    Raises ValueError where it holds NaNs or infinities."""
    return gemm_native.NativeInt8Weight(weight, bias)


def linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x [T, K] -> x @ weight.T + bias, [T, N], in the dtype the weight was prepared for. T may be 0."""
    return w.matmul(x)


def gated_linear(x: Tensor, w: LinearWeight, activation: str = "silu") -> Tensor:
    """gated(linear(x, w), activation), x [T, K] -> [T, N / 2]: rows of w are gates, then as many ups."""
    if activation != "silu":
        return gated(w.matmul(x), activation)
    out = w.gated_matmul(x)
    return silu_mul(w.matmul(x)) if out is None else out


def prepare_heads(weight: Tensor) -> HeadsWeight:
    """Bring a matrix for each head, weight [heads, N, K], into the form that the chosen kernel reads."""
    return _prepare_heads.runs[weight.device, weight.dtype](weight)


def linear_by_head(x: Tensor, w: HeadsWeight) -> Tensor:
    """x [T, heads, K], each head times its own matrix -> [T, heads, N]."""
    return w.matmul(x)


def prepare_experts(shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    """Room for the experts of one layer, each of which is then filled in, in the form that the chosen kernel reads."""
    return _prepare_experts.runs[device, dtype](shape, dtype, device)


def moe(
    x: Tensor,
    logits: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    correction: Tensor | None = None,
    plus: Tensor | None = None,
) -> Tensor:
    """Mixture of experts: x [T, H] and its router's logits [T, E] -> [T, H], the weighted sum of the experts that `routing`
    chooses for each token, and `plus` [T, H] on top (a shared expert's result).

    correction [E] float32 is added to the scores where they choose (`Routing`). Any T; which experts are chosen stays on the
    device. A NaN in a token's logits or x stays with that token."""
    return experts.mix(x, logits, routing, correction, plus)


def embedding(ids: Tensor, table: Tensor | LinearWeight) -> Tensor:
    """Rows `ids` [T] int64 of table [V, H] -> [T, H]. A tied embedding reads them out of the prepared lm_head."""
    return (
        table.rows(ids) if isinstance(table, LinearWeight) else _embedding.runs[table.device, table.dtype](ids, table)
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / sqrt(mean(x^2) + eps) * weight [H], same shape (Zhang and Sennrich 2019)."""
    return _rms_norm.runs[x.device, x.dtype](x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, H] += x [T, H] in place; returns rms_norm(residual), [T, H]."""
    return _add_rms_norm.runs[x.device, x.dtype](x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight [H] + bias [H], x [..., H], same shape (Ba et al. 2016). Without a weight
    it multiplies by ones, without a bias it adds zeros."""
    return _layer_norm.runs[x.device, x.dtype](x, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """residual [T, H] += x [T, H] in place; returns layer_norm(residual), [T, H]."""
    return _add_layer_norm.runs[x.device, x.dtype](x, residual, weight, bias, eps)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by their positions [T] int64.

    cos_sin [max_pos, D_rot] float32 holds D_rot / 2 cosines, then as many sines; only the first D_rot <= D dims turn, which
    may be none.
    q and k may be views into one qkv tensor as long as their last dim is contiguous."""
    _rope.runs[q.device, q.dtype](q, k, positions, cos_sin, interleaved)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k, v [T, Hkv, D] into k_cache, v_cache [num_blocks, Hkv, block_size, D] at slots [T] int64.

    slot = block_id * block_size + offset; -1 writes nothing. Caches of int8 are four bytes wider: each token's head ends in the
    float32 that its numbers are times (ops/kv/lines.py)."""
    _store_kv.runs[k.device, k.dtype, k_cache.dtype, k.shape[2]](k, v, k_cache, v_cache, slots)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of q [T, Hq, D] over the paged context that `meta` describes, [T, Hq, D].

    k_cache, v_cache [num_blocks, Hkv, block_size, D]; Hq is a multiple of Hkv, query head h reads kv head
    h // (Hq // Hkv). Query i of row r sees keys 0 to its own position, or only the last `window` of them.
    Where `softcap` is given, scores s = q k^T * scale become softcap * tanh(s / softcap) (Gemma 2, 2024).
    sinks [Hq] float32: a further score of each head, which takes its share of the softmax but adds nothing (GPT-OSS, 2025)."""
    run = _paged_attention.runs[q.device, q.dtype, k_cache.dtype, q.shape[2]]
    return run(q, k_cache, v_cache, meta, scale, window, softcap, sinks)


def attend(
    qkv: Tensor, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """All of a layer between its projections: per-head norms, rotary embedding, keys and values into the cache, mixing.

    qkv [T, (Hq + 2 Hkv) * D], which is overwritten; positions and slots [T] int64 as for `rope` and `store_kv`; returns
    [T, Hq * D]. Every token's key is stored before any query of the step reads it."""
    run = _attend.runs[qkv.device, qkv.dtype, k_cache.dtype, heads.head_size]
    return run(qkv, heads, positions, k_cache, v_cache, slots, meta)


def _attend_in_parts(
    qkv: Tensor, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    q, k, v = heads.split(qkv)
    if heads.norms is not None:
        q = rms_norm(q, heads.norms[0], heads.norm_eps)
        k = rms_norm(k, heads.norms[1], heads.norm_eps)
    rope(q, k, positions, heads.cos_sin)
    store_kv(k, v, k_cache, v_cache, slots)
    return paged_attention(q, k_cache, v_cache, meta, heads.scale, heads.window, heads.softcap, heads.sinks).flatten(1)


def attend_latent(
    q: Tensor, latent: Tensor, heads: LatentHeads, positions: Tensor, cache: Tensor, slots: Tensor, meta: AttentionMeta
) -> Tensor:
    """Latent attention (`LatentHeads`, D = rank + P): keys are stored, then mixed by each head, [T, Hq, rank].

    q [T, Hq, D] and latent [T, D], contiguous, the last P dims of both yet to be turned, which happens in place; cache
    [num_blocks, 1, block_size, D]; positions and slots [T] int64 as for `rope` and `store_kv`."""
    run = _attend_latent.runs[q.device, q.dtype, cache.dtype, heads.head_size]
    return run(q, latent, heads, positions, cache, slots, meta)


def _attend_latent_in_parts(
    q: Tensor, latent: Tensor, heads: LatentHeads, positions: Tensor, cache: Tensor, slots: Tensor, meta: AttentionMeta
) -> Tensor:
    keys = latent[:, None]
    rope(q[..., heads.rank :], keys[..., heads.rank :], positions, heads.cos_sin, interleaved=True)
    store_kv(keys, keys, cache, cache, slots)
    return paged_attention(q, cache, cache, meta, heads.scale)[..., : heads.rank]


_attend_latent = Op(
    "attend_latent",
    _USUAL_ATTENTION,
    [
        Kernel("attend_latent", "triton", _on_cuda_at_any_size, "ops.attention.triton_latent:attend_latent"),
        Kernel("attend_latent", "reference", _any, _attend_latent_in_parts, "one op after another"),
    ],
)
_attend = Op(
    "attend",
    _USUAL_ATTENTION,
    [
        Kernel("attend", "triton", _on_cuda, "ops.attention.layer:attend"),
        Kernel("attend", "reference", _any, _attend_in_parts, "one op after another"),
    ],
    Kernel("attend", "recorded", recording.supports_attention, recording.attend),
)


# Ops of recurrent layers. What they remember of a sequence is in a slot of `states` [num_slots, ...] float32, whose inner dims are
# contiguous; line l of the step (`meta`, whose lines may be padded with empty ones) has slots[l], int64, -1 for none. A line that
# begins its sequence finds zeros, whatever its slot holds; behind the step the slot holds the state behind the line's last token.


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, slots: Tensor, meta: AttentionMeta
) -> Tensor:
    """x [T, C] convolved with weight [K, C] along each sequence, plus bias [C], then silu if asked for, [T, C]: token t gets
    sum of x[t - K + 1 + k] * weight[k]. States [K - 1, C] are a sequence's last inputs. Rows of x may be strided."""
    return _causal_conv.runs[x.device, x.dtype](x, weight, bias, silu, states, slots, meta)


def state_space_scan(
    xbc: Tensor, steps: Tensor, heads: ScanHeads, states: Tensor, slots: Tensor, meta: AttentionMeta
) -> Tensor:
    """Mamba-2's scan (Dao and Gu 2024), [T, heads * P]: with s = softplus(steps + step_bias), a head's state [P, N] becomes
    exp(s * a) * state + s * x B^T, and gives state C + d * x.

    xbc [T, heads * P + 2 * groups * N]: x, B and C, contiguous; steps [T, heads]. Rows may be strided."""
    return _state_space_scan.runs[xbc.device, xbc.dtype](xbc, steps, heads, states, slots, meta)


def selective_scan(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, gate: Tensor, states: Tensor, slots: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """Mamba's scan (Gu and Dao 2023), [T, I]: with s = softplus(steps), a channel's state [N] becomes
    exp(s * a) * state + s * x B, and gives (state C + d * x) * silu(gate).

    x, steps and gate [T, I]; b and c [T, N], of all channels; a [I, N] (below 0) and d [I] float32. Rows may be strided."""
    run = _selective_scan.runs[x.device, x.dtype]
    return run(x, steps, b, c, a, d, gate, states, slots, meta)


def gated_delta_rule(
    qkv: Tensor, rates: Tensor, heads: DeltaHeads, states: Tensor, slots: Tensor, meta: AttentionMeta
) -> Tensor:
    """Gated DeltaNet's scan (Yang et al. 2024), [T, value heads * Dv]: a head's state [Dk, Dv] fades to
    exp(a * softplus(rate + step_bias)) of it, learns k (v - state^T k)^T * beta, and gives state^T q * Dk^-0.5, q and k made unit
    vectors.

    qkv [T, 2 * key heads * Dk + value heads * Dv] contiguous; rates [T, 2 * value heads]: logits of beta, then rates."""
    return _gated_delta_rule.runs[qkv.device, qkv.dtype](qkv, rates, heads, states, slots, meta)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool) -> Tensor:
    """RMS norm of each `group_size` neighbours of x [T, I], times weight [I]; x is multiplied by silu(gate [T, I]) before
    (`gate_first`) or after. Rows of the gate may be strided."""
    return _gated_rms_norm.runs[x.device, x.dtype](x, gate, weight, eps, group_size, gate_first)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I] -> silu(first half) * second half, [T, I]."""
    return _silu_mul.runs[gate_up.device, gate_up.dtype](gate_up)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 * I] -> activation(first half) * second half, [T, I]; `activation` as for `activate`."""
    return _gated.runs[gate_up.device, gate_up.dtype](gate_up, activation)


def activate(x: Tensor, activation: str) -> Tensor:
    """x [T, I] -> the same shape: "silu", "gelu", "gelu_tanh" (its approximation), "relu" or "relu2" (relu squared)."""
    return _activate.runs[x.device, x.dtype](x, activation)


def sample(
    logits: Tensor, sample_rows: Tensor, sample_positions: Tensor, last_ids: Tensor, tables: SamplingTables
) -> Tensor:
    """One id per line of logits [L, V], [L] int64, as `tables` ask for row sample_rows[l] (int32; -1: none) at index
    sample_positions[l] (int64); -1 where a line's logits are unusable. Writes last_ids[row] and the rows' counts."""
    run = _sample.runs[logits.device, logits.dtype]
    return run(logits, sample_rows, sample_positions, last_ids, tables)


def unpack(
    packed: Tensor, to: StepTensors, *, num_tokens: int, num_lines: int, num_updates: int, padded_tokens: int,
    padded_lines: int,
) -> None:  # fmt: skip
    """Spread one upload over the inputs of a step and the block tables; see ops/inputs/triton_unpack.py for its order.

    packed [(2 + G) * num_tokens + 4 * num_lines + 3 * num_updates] int32 or longer, for G block tables of each row."""
    run = _unpack.runs[packed.device, packed.dtype]
    run(
        packed, to, num_tokens=num_tokens, num_lines=num_lines, num_updates=num_updates, padded_tokens=padded_tokens,
        padded_lines=padded_lines,
    )  # fmt: skip


def compile_ahead(device: torch.device, dtype: torch.dtype) -> None:
    """Begin to compile what this dtype needs on a CUDA device, beside whatever else start-up does."""
    if device.type == "cuda":
        from ops.attention import cuda as _registers_its_program  # noqa: F401

        cuda_program.compile_ahead(dtype, device)


@contextmanager
def compile_together(device: torch.device) -> Iterator[None]:
    """Steps run inside compute nothing of use: kernels that are not compiled yet only begin to be, all at a time; when it ends
    they are."""
    if device.type != "cuda":
        yield
        return
    from ops.compiling import compile_together as together  # imports Triton

    with together(device):
        yield


def can_record(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a `Recorder` records anything there."""
    refusal = native.supports(ShapeClass(device.type, dtype)) or native.lacks("Program")
    return forced() != "reference" and refusal is None


def set_num_threads(n: int) -> None:
    """Threads that one op may use, the calling one included.

    With the native kernels torch itself keeps to one thread: what is left to it is small, and its OpenMP threads would
    spin on the cores that ours need."""
    if n < 1:
        raise ValueError(f"at least one thread is needed, not {n}")
    if native.module is not None and forced() != "reference":
        native.module.set_num_threads(n)
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(n)
