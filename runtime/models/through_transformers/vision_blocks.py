"""Blocks of vision transformers, computed by our ops with the weights of the transformers modules that they replace.

Three kinds of encoders are supported: packed patches of several images (Qwen, GLM); images of one size (SigLIP, CLIP, Idefics 3,
InternVL); and one image at a time (Pixtral). transformers' modules still compute patches, positions, windows and the projection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ops

log = logging.getLogger("oneloop.models")

_GATED = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # names in transformers, and in `ops.gated`


class _Pass:
    """Data shared by the blocks of a pass, computed by the first block that needs it."""

    def __init__(self) -> None:
        self._cos: Tensor | None = None
        self._starts: dict[int, tuple[Tensor, ops.AttentionMeta]] = {}
        self._pictures: ops.AttentionMeta | None = None
        self.cos_sin = torch.empty(0)
        self.positions = torch.empty(0)

    def turn(self, cos: Tensor, sin: Tensor) -> None:
        """Set the rotary embedding of the pass. cos, sin [T, D]; their second halves repeat the first."""
        if self._cos is cos:
            return
        half = cos.shape[1] // 2
        self._cos = cos
        self.cos_sin = torch.cat([cos[:, :half], sin[:, :half]], dim=1).float()
        self.positions = torch.arange(len(cos), device=cos.device)
        self._starts.clear()

    def begin(self) -> None:
        self._pictures = None

    def pictures(self, num_pictures: int, num_patches: int, like: Tensor) -> ops.AttentionMeta:
        """Return attention metadata for `num_pictures` images with `num_patches` patches each."""
        if self._pictures is None:
            num = num_pictures * num_patches
            starts = torch.arange(0, num + 1, num_patches, dtype=torch.int32, device=like.device)
            spans = tuple((at, at + num_patches, num_patches) for at in range(0, num, num_patches))
            self._pictures = ops.AttentionMeta(
                starts, starts[1:], starts[:0, None], num_patches, num_patches, spans=spans
            )
            if self._cos is None:  # no rotary embedding
                self.positions = starts
                self.cos_sin = torch.empty((0, 0), device=like.device)
        return self._pictures

    def meta(self, starts: Tensor) -> ops.AttentionMeta:
        """Return attention metadata for groups of patches. A group attends to itself; `starts` [R + 1] are the groups' first
        patches."""
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
        """Add x to residual [T, H] in place, and return its norm."""
        if self.is_rms:
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


def _linear(
    *parts: Any, more_rows: int = 0, more_columns: int = 0, factors: Tensor | None = None
) -> ops.LinearWeight:  # fmt: skip
    """Join linear modules into one layer with concatenated outputs. Each is padded with `more_rows` rows and `more_columns` columns
    of zeros, and its outputs are multiplied by `factors` [H], if given."""
    stored = []
    for part in parts:
        weight, bias = part.weight.data, None if part.bias is None else part.bias.data
        if factors is not None:
            weight, bias = weight * factors[:, None], None if bias is None else bias * factors
        weight = nn.functional.pad(weight, (0, more_columns, 0, more_rows))
        bias = None if bias is None else nn.functional.pad(bias, (0, more_rows))
        stored.append(ops.StoredWeight.dense(weight, bias))
    return ops.prepare_linear(stored if len(stored) > 1 else stored[0])


class _Parts(NamedTuple):
    """Modules of a transformers block. `factors`: factors of the outputs of attention and MLP."""

    norms: tuple[Any, Any]
    attention: Any
    scale: float
    qkv: Sequence[Any]
    output: Any
    mlp: Any
    factors: tuple[Tensor, Tensor] | None = None


def _packed(block: Any) -> _Parts:
    attention = block.attn
    qkv = [attention.qkv] if hasattr(attention, "qkv") else [attention.q, attention.k, attention.v]
    return _Parts((block.norm1, block.norm2), attention, attention.scaling, qkv, attention.proj, block.mlp)


def _siglip(layer: Any) -> _Parts:
    attention = layer.self_attn
    scale = attention.scale if hasattr(attention, "scale") else attention.scaling
    norms = layer.layer_norm1, layer.layer_norm2
    return _Parts(norms, attention, scale, _projections(attention), attention.out_proj, layer.mlp)


def _internvl(layer: Any) -> _Parts:
    attention = layer.attention
    norms = layer.layernorm_before, layer.layernorm_after
    if not isinstance(attention.q_norm, nn.Identity):
        raise AttributeError("queries and keys are normed")
    factors = layer.lambda_1.data, layer.lambda_2.data
    output = attention.projection_layer
    return _Parts(norms, attention, attention.scale, _projections(attention), output, layer.mlp, factors)


def _pixtral(layer: Any) -> _Parts:
    attention = layer.attention
    norms = layer.attention_norm, layer.ffn_norm
    return _Parts(norms, attention, attention.scaling, _projections(attention), attention.o_proj, layer.feed_forward)


def _projections(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


class Block(nn.Module):
    """Vision block: a norm, attention among patches, a norm, and an MLP, with residuals."""

    def __init__(self, parts: _Parts, shared: _Pass) -> None:
        """Create the block. Raises AttributeError or KeyError if the modules have another structure."""
        super().__init__()
        first, second = parts.factors or (None, None)
        self._shared = shared
        self._norms = _Norm.of(parts.norms[0]), _Norm.of(parts.norms[1])
        self._num_heads, self._scale = parts.attention.num_heads, parts.scale
        self._qkv, self._output = _linear(*parts.qkv), _linear(parts.output, factors=first)
        self._mlp = _mlp(parts.mlp, parts.attention.config.hidden_act, second)

    def _attended(self, qkv: Tensor, meta: ops.AttentionMeta) -> Tensor:
        """Return the attention output [T, H] for qkv [T, 3 * H]. `meta`: groups of patches that attend to each other."""
        size = qkv.shape[1] // (3 * self._num_heads)
        cos_sin = self._shared.cos_sin
        heads = ops.AttentionHeads(self._num_heads, self._num_heads, size, self._scale, cos_sin, mask="full")
        return ops.attend_packed(qkv, heads, self._shared.positions, meta)

    def _computed(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the block's output [T, H] for x [T, H], as a new tensor. `x` is unchanged, because hooks may record it."""
        mixed = attend(ops.linear(self._norms[0](x), self._qkv))
        residual = ops.linear(mixed, self._output)
        residual += self._mlp(self._norms[1].add(x, residual))
        return residual


class VisionBlock(Block):
    """Block for packed patches of several images or frames, or of their windows."""

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """Compute hidden_states [T, H]. transformers calls this method. cu_seqlens [R + 1]: starts of groups; position_embeddings:
        [T, D] each."""
        self._shared.turn(*position_embeddings)
        return self._computed(hidden_states, lambda qkv: self._attended(qkv, self._shared.meta(cu_seqlens)))


class PictureBlock(Block):
    """Block for batches of images with equal numbers of patches."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        """Compute hidden_states [B, N, H]. transformers calls this method. attention_mask [B, 1, 1 or N, N] marks padding."""
        num_pictures, num_patches, _width = hidden_states.shape
        meta = self._shared.pictures(num_pictures, num_patches, hidden_states)

        def attend(qkv: Tensor) -> Tensor:
            if attention_mask is None:
                return self._attended(qkv, meta)
            q, k, v = qkv.view(num_pictures, num_patches, 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attention_mask, scale=self._scale)
            return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

        return self._computed(hidden_states.flatten(0, 1).contiguous(), attend).view(hidden_states.shape)


class TurnedBlock(Block):
    """Block for the patches of one image, with a rotary embedding."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """Compute hidden_states [1, T, H]. transformers calls this method. position_embeddings: [T, D] each. The mask is ignored,
        since there is only one image."""
        self._shared.turn(*position_embeddings)
        meta = self._shared.pictures(1, hidden_states.shape[1], hidden_states)
        return self._computed(hidden_states[0].contiguous(), lambda qkv: self._attended(qkv, meta))[None]


def _mlp(mlp: Any, activation: str, factors: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return an MLP whose inner width is padded to a multiple of 8. The matrix units of a GPU read 16 bytes at a time. Qwen2.5-VL's
    3,420 inner features are not aligned to that, and took three times as long."""
    if hasattr(mlp, "gate_proj"):
        more = -mlp.gate_proj.out_features % 8
        gate_up = _linear(mlp.gate_proj, mlp.up_proj, more_rows=more)
        down = _linear(mlp.down_proj, more_columns=more, factors=factors)
        name = _GATED[activation]
        return lambda x: ops.linear(ops.gated(ops.linear(x, gate_up), name), down)
    first, second = (mlp.fc1, mlp.fc2) if hasattr(mlp, "fc1") else (mlp.linear_fc1, mlp.linear_fc2)
    more = -first.out_features % 8
    up, down = _linear(first, more_rows=more), _linear(second, more_columns=more, factors=factors)
    if activation in _GATED:
        name = _GATED[activation]
        return lambda x: ops.linear(ops.activate(ops.linear(x, up), name), down)
    act = next(getattr(mlp, name) for name in ("act", "act_fn", "activation_fn") if hasattr(mlp, name))
    return lambda x: ops.linear(act(ops.linear(x, up)), down)


class PatchProjection(nn.Module):
    """Convolution with non-overlapping kernels, computed as a matrix product, which is faster than cuDNN's 3D convolution."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        self._linear = ops.prepare_linear(
            ops.StoredWeight.dense(conv.weight.data.flatten(1), None if conv.bias is None else conv.bias.data)
        )
        self.weight = torch.empty(0, dtype=conv.weight.dtype)  # transformers reads its dtype

    def forward(self, patches: Tensor) -> Tensor:
        """Return projections [T, H] of patches [T, channels, time, height, width], each as large as the kernel."""
        return ops.linear(patches.flatten(1), self._linear)


def take_over(tower: Any) -> bool:
    """Replace the blocks of transformers' vision encoder `tower` by ours. Return False and change nothing if its structure is
    unsupported."""
    shared = _Pass()
    try:
        blocks = [VisionBlock(_packed(block), shared) for block in tower.blocks]
    except (AttributeError, KeyError) as error:
        log.debug("%s is computed by its own modules: %s", type(tower).__name__, error)
        return False
    tower.blocks = nn.ModuleList(blocks)
    conv = tower.patch_embed.proj
    if isinstance(conv, nn.Conv3d) and conv.stride == conv.kernel_size:
        tower.patch_embed.proj = PatchProjection(conv)
    return True


_KINDS: Sequence[tuple[Callable[[Any], _Parts], type[Block]]] = (
    (_siglip, PictureBlock), (_internvl, PictureBlock), (_pixtral, TurnedBlock),
)  # fmt: skip


def take_over_layers(model: nn.Module) -> int:
    """Replace the forward pass of supported layers of `model` by ours, and return their number. The modules keep their names and
    classes, by which transformers finds the modules whose outputs it records."""
    num = 0
    for stack in [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)]:
        parent = next(each for each in model.modules() if stack in each.children())
        for parts_of, kind in _KINDS:
            shared = _Pass()
            try:
                blocks = [kind(parts_of(layer), shared) for layer in stack]
            except (AttributeError, KeyError):
                continue
            parent.register_forward_pre_hook(lambda *_, shared=shared: shared.begin())
            for layer, block in zip(stack, blocks, strict=True):
                layer._modules.clear()
                layer._parameters.clear()
                layer.ours = block
                layer.forward = block.forward
            num += len(blocks)
            break
    return num


def towers(model: nn.Module) -> Sequence[Any]:
    """Return the vision encoders of a model that process packed patches."""
    return [each for each in model.modules() if hasattr(each, "blocks") and hasattr(each, "patch_embed")]
