"""Blocks of vision transformers, computed by our ops in the place of transformers' own modules, whose weights they take.

Of towers that take patches of several pictures side by side. What stands around the blocks stays transformers': patches, positions,
windows, and what makes outputs of patches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ops

log = logging.getLogger("oneloop.models")

_GATED = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # transformers' names, and those of `ops.gated`


class _Pass:
    """What the blocks of a pass have in common, made by the first that asks."""

    def __init__(self) -> None:
        self._cos: Tensor | None = None
        self._starts: dict[int, tuple[Tensor, ops.AttentionMeta]] = {}
        self.cos_sin = torch.empty(0)
        self.positions = torch.empty(0)

    def turn(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [T, D]: of a token's dims, of which the second half repeats the first."""
        if self._cos is cos:
            return
        half = cos.shape[1] // 2
        self._cos = cos
        self.cos_sin = torch.cat([cos[:, :half], sin[:, :half]], dim=1).float()
        self.positions = torch.arange(len(cos), device=cos.device)
        self._starts.clear()

    def meta(self, starts: Tensor) -> ops.AttentionMeta:
        """`starts` [R + 1]: where patches begin that see each other."""
        known = self._starts.get(id(starts))
        if known is None:
            num = len(self.positions)
            places = starts.to(self.positions.device, torch.int32)
            known = starts, ops.AttentionMeta(places, places[1:], places[:0, None], num, num)
            self._starts[id(starts)] = known
        return known[1]


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool

    @classmethod
    def of(cls, norm: Any) -> _Norm:
        if isinstance(norm, nn.LayerNorm):
            return cls(norm.weight, norm.bias, norm.eps, is_rms=False)
        return cls(norm.weight, None, norm.variance_epsilon, is_rms=True)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_rms:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Of residual [T, H], to which x is added in place."""
        if self.is_rms:
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


def _linear(*parts: Any, more_rows: int = 0, more_columns: int = 0) -> ops.LinearWeight:
    """Of modules whose outputs stand side by side, each with so many rows and columns of zeros more."""
    stored = []
    for part in parts:
        weight = nn.functional.pad(part.weight.data, (0, more_columns, 0, more_rows))
        bias = None if part.bias is None else nn.functional.pad(part.bias.data, (0, more_rows))
        stored.append(ops.StoredWeight.dense(weight, bias))
    return ops.prepare_linear(stored if len(stored) > 1 else stored[0])


class VisionBlock(nn.Module):
    """A block in the place of transformers' `block`: attention among patches, then an MLP, a norm before either."""

    def __init__(self, block: Any, shared: _Pass) -> None:
        """Raises AttributeError where `block` is built otherwise."""
        super().__init__()
        attention, mlp = block.attn, block.mlp
        parts = [attention.qkv] if hasattr(attention, "qkv") else [attention.q, attention.k, attention.v]
        self._shared = shared
        self._norms = _Norm.of(block.norm1), _Norm.of(block.norm2)
        self._num_heads, self._scale = attention.num_heads, attention.scaling
        self._qkv, self._output = _linear(*parts), _linear(attention.proj)
        self._mlp = _mlp(mlp, attention.config.hidden_act)

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """As transformers calls it. hidden_states [T, H], changed in place; cu_seqlens [R + 1]; position_embeddings [T, D] each."""
        self._shared.turn(*position_embeddings)
        qkv = ops.linear(self._norms[0](hidden_states), self._qkv)
        heads = ops.AttentionHeads(
            self._num_heads,
            self._num_heads,
            qkv.shape[1] // (3 * self._num_heads),
            self._scale,
            self._shared.cos_sin,
            mask="full",
        )
        mixed = ops.attend_packed(qkv, heads, self._shared.positions, self._shared.meta(cu_seqlens))
        x = self._norms[1].add(ops.linear(mixed, self._output), hidden_states)
        hidden_states += self._mlp(x)
        return hidden_states


def _mlp(mlp: Any, activation: str) -> Callable[[Tensor], Tensor]:
    """What is between its linear layers has a multiple of eight features: Qwen2.5-VL's 3,420 are no whole number of the 16 bytes
    that a GPU's matrix units read at once, and took three times as long."""
    if hasattr(mlp, "gate_proj"):
        more = -mlp.gate_proj.out_features % 8
        gate_up = _linear(mlp.gate_proj, mlp.up_proj, more_rows=more)
        down = _linear(mlp.down_proj, more_columns=more)
        name = _GATED[activation]
        return lambda x: ops.linear(ops.gated(ops.linear(x, gate_up), name), down)
    first, second = (mlp.fc1, mlp.fc2) if hasattr(mlp, "fc1") else (mlp.linear_fc1, mlp.linear_fc2)
    more = -first.out_features % 8
    up, down = _linear(first, more_rows=more), _linear(second, more_columns=more)
    if activation in _GATED:
        name = _GATED[activation]
        return lambda x: ops.linear(ops.activate(ops.linear(x, up), name), down)
    act = mlp.act if hasattr(mlp, "act") else mlp.act_fn
    return lambda x: ops.linear(act(ops.linear(x, up)), down)


class PatchProjection(nn.Module):
    """A convolution whose kernels stand side by side, as the product that it is: cuDNN has none of three dims that is as fast."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        self._linear = ops.prepare_linear(
            ops.StoredWeight.dense(conv.weight.data.flatten(1), None if conv.bias is None else conv.bias.data)
        )
        self.weight = torch.empty(0, dtype=conv.weight.dtype)  # transformers asks for its dtype

    def forward(self, patches: Tensor) -> Tensor:
        """[T, channels, time, height, width] of one kernel each -> [T, H]."""
        return ops.linear(patches.flatten(1), self._linear)


def take_over(tower: Any) -> bool:
    """Have the blocks of transformers' `tower` computed here. False where it is built otherwise, and stays as it is."""
    shared = _Pass()
    try:
        blocks = [VisionBlock(block, shared) for block in tower.blocks]
    except (AttributeError, KeyError) as error:
        log.debug("%s is computed by its own modules: %s", type(tower).__name__, error)
        return False
    tower.blocks = nn.ModuleList(blocks)
    conv = tower.patch_embed.proj
    if isinstance(conv, nn.Conv3d) and conv.stride == conv.kernel_size:
        tower.patch_embed.proj = PatchProjection(conv)
    return True


def towers(model: nn.Module) -> Sequence[Any]:
    """Those parts of a model that take patches side by side."""
    return [each for each in model.modules() if hasattr(each, "blocks") and hasattr(each, "patch_embed")]
