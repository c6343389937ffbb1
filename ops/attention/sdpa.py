"""Long prompts, whole in one step, through torch's own attention: cuDNN's kernel on Hopper, FlashAttention where it is missing.

Serves only requests whose whole context stands in this step's qkv, read in place: no paged cache, no copies of the inputs. It
plans on the host, so it is for eager steps. What it leaves over goes to the paged kernels, told `prefill_from` too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta

_BACKENDS = {
    "cuda": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "cpu": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}


def refusal(heads: AttentionHeads) -> str | None:
    """Why these heads cannot be served, None if they can."""
    if heads.head_size > 256:
        return "torch's kernels serve head sizes up to 256"
    if heads.window is not None or heads.softcap is not None or heads.sinks is not None or heads.alibi is not None:
        return "torch's kernels know neither windows nor soft caps nor sinks nor linear biases"
    return None


def prefill_attention(
    qkv: Tensor, out: Tensor, num_heads: int, num_kv_heads: int, head_size: int, meta: AttentionMeta, scale: float,
    prefill_from: int,
) -> list[tuple[int, int, int]]:  # fmt: skip
    """Write the attention of requests that are whole prompts of at least `prefill_from` tokens into their rows of out [T, Hq, D].

    qkv [T, (Hq + 2 * Hkv) * D], heads already normed and rotated. Returns the spans (start, end, context length) of
    the requests still to do, empty ones left out: all of them where torch has no fused kernel (float32 on CUDA). Raises
    ValueError without `meta.spans`, which a captured graph has not."""
    if meta.spans is None:
        raise ValueError("prefill_attention plans on the host: it needs meta.spans")
    spans = [span for span in meta.spans if span[0] < span[1]]
    if qkv.is_cuda and (qkv.dtype == torch.float32 or head_size > 256):
        return spans
    whole = [span for span in spans if is_whole_prompt(*span, prefill_from)]
    if not whole:
        return spans
    with sdpa_kernel(_BACKENDS[qkv.device.type], set_priority=True):
        for length, group in itertools.groupby(whole, key=lambda span: span[2]):
            for start, end in _joined(group):
                heads = qkv[start:end].view(-1, length, num_heads + 2 * num_kv_heads, head_size).transpose(1, 2)
                q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
                mixed = scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=num_heads != num_kv_heads
                )
                out[start:end].view(-1, length, num_heads, head_size).copy_(mixed.transpose(1, 2))
    return [span for span in spans if not is_whole_prompt(*span, prefill_from)]


def is_whole_prompt(start: int, end: int, context: int, prefill_from: int) -> bool:
    """Whether this request is ours: all of its context in this step, and long."""
    return end - start == context >= prefill_from


def _joined(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(start, end) of spans in rising order, those that touch made one: equal lengths side by side are one batch."""
    joined: list[tuple[int, int]] = []
    for start, end, _ in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
