"""Check at start-up that a model run through transformers agrees with transformers' own computation on a few tokens.

Tracing shows how attention is called. It cannot show whether tokens interact elsewhere, or whether positions are used as given.
Outputs are therefore compared, and a model whose outputs differ is rejected.

Both sides use the same rounded weights, so the remaining difference is rounding in the dtype of activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ops
from runtime.kv.kinds import AttentionKVSpec
from runtime.kv.kv_cache import LayerKV
from runtime.kv.layout import BLOCK_SIZE
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.model import UnsupportedModel
from runtime.models.through_transformers.model import TransformersModel

_SPANS = (7, 2, 1, 1, 1)  # a prompt in two pieces, then single tokens
NUM_TOKENS = sum(_SPANS)
# Error of a token's logits, relative to their norm. 16-bit rounding causes 1e-2, a different computation rarely less than 0.3.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
_AGREEING = 0.75  # share of tokens: rounding may change the experts of some


def probe_ids(vocab_size: int) -> list[int]:
    return [(7 * index + 11) % vocab_size for index in range(NUM_TOKENS)]


@torch.inference_mode()
def check_agreement(model: TransformersModel, expected: Tensor) -> None:
    """Compare the model's logits with `expected` [NUM_TOKENS, V], transformers' logits for `probe_ids`. Raises UnsupportedModel if
    they differ."""
    ours = _logits_in_pieces(model, probe_ids(model.spec.vocab_size))
    expected = expected.float()
    errors = (ours.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    if float((errors < _TOLERANCE[model.dtype]).float().mean()) < _AGREEING:
        raise UnsupportedModel(
            f"in steps of several sequences it computes otherwise than alone: its logits are off by {float(errors.max()):.1%}"
        )


def _logits_in_pieces(model: TransformersModel, ids: Sequence[int]) -> Tensor:
    """Return logits [NUM_TOKENS, V] of `ids`, computed in several steps. Each step also contains another sequence."""
    assert NUM_TOKENS <= BLOCK_SIZE
    device = torch.device(model.device)

    def empty(kv: AttentionKVSpec) -> Tensor:
        shape = (2, kv.num_kv_heads, BLOCK_SIZE, kv.head_size)
        return torch.zeros(shape, dtype=getattr(torch, model.dtype), device=device)

    kv_caches = [LayerKV((empty(kind.kv), empty(kind.kv))) for kind in model.spec.memory_kinds()]
    logits, done = [], 0
    for span in _SPANS:
        # Line 0: the same ids reversed, in block 0. Line 1: ours, in block 1.
        end = done + span
        tokens = torch.tensor([*ids[::-1][done:end], *ids[done:end]], device=device)
        positions = torch.arange(done, end, device=device).repeat(2)
        slots = positions + torch.tensor([0, BLOCK_SIZE], device=device).repeat_interleave(span)
        meta = ops.AttentionMeta(
            torch.tensor([0, span, 2 * span], dtype=torch.int32, device=device),
            torch.tensor([end, end], dtype=torch.int32, device=device),
            torch.tensor([[0], [1]], dtype=torch.int32, device=device),
            span,
            end,
        )
        hidden = model.forward(ForwardStep(tokens, positions, (slots,), (meta,), kv_caches))
        logits.append(model.compute_logits(hidden, torch.arange(span, 2 * span, device=device)))
        done = end
    return torch.cat(logits)
