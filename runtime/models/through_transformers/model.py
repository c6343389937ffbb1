"""Decoder of transformers' modules with our interface `Model`. A step's tokens are one batch row, and attention reads our KV
blocks.

Tokens of different sequences are adjacent in that row. They interact only in `paged_attention`, which separates them. This works
with any torch modules, independent of how they were built or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

import ops
from runtime.kv.kv_cache import LayerKV
from runtime.models.blocks.pooler import PoolerBlock
from runtime.models.blocks.rope import cos_sin_table
from runtime.models.forward_step import ForwardStep
from runtime.models.through_transformers.spec import AttentionCall, TransformersSpec


@dataclass(slots=True)
class _Pass:
    """State of a running forward pass: its attention layers, its step, and the number of attention calls so far."""

    layers: Sequence[_PagedLayer]
    step: ForwardStep
    num_calls: int = 0


_pass: ContextVar[_Pass] = ContextVar("pass")


class _PagedLayer:
    def __init__(self, call: AttentionCall, cos_sin: Tensor) -> None:
        self._call = call
        self._heads = ops.AttentionHeads(
            call.num_heads, call.num_kv_heads, call.head_size, call.scale, cos_sin, window=call.window,
            softcap=call.softcap,
        )  # fmt: skip

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, cache_index: int, step: ForwardStep
    ) -> Tensor:
        """Return the attention output [1, T, Hq, Dv] of query [1, Hq, T, Dk], key [1, Hkv, T, Dk] and value [1, Hkv, T, Dv]."""
        if sinks is not None and self._heads.sinks is None:  # a weight, so it is the same in every step
            self._heads = replace(self._heads, sinks=sinks.float())
        size = self._call.head_size
        parts = [_widened(part[0], size) for part in (query, key, value)]
        qkv = torch.cat([part.transpose(0, 1) for part in parts], dim=1).flatten(1).to(value.dtype)
        (keys, values), slot_mapping, attn_metadata = step.cache(cache_index)
        mixed = ops.attend(qkv, self._heads, step.positions, keys, values, slot_mapping, attn_metadata)
        return mixed.view(1, len(qkv), -1, size)[..., : self._call.value_size]


def _widened(heads: Tensor, size: int) -> Tensor:
    """Pad heads [H, T, D] with zeros to [H, T, size]."""
    missing = size - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute a layer's attention of a step. transformers calls this function. `attention_mask` is ignored, because the step
    defines the visible keys."""
    current = _pass.get()
    index = current.num_calls
    mixed = current.layers[index].attend(query, key, value, options.get("s_aux"), index, current.step)
    current.num_calls += 1
    return mixed, None


class TransformersModel:
    """Model computed by transformers' modules, an implementation of `model.Model`. `causal`: a causal LM whose attention calls
    `paged_attention`; its attribute `base` is the base model. `linears`: dtype of its linear layers.

    `causal` is modified: its linear layers are replaced by `ops`. Do not use it afterwards."""

    graph_unsupported_reason = None  # unknown before the first attempt
    may_refuse_capture = True  # modules may read values that they computed, which cannot be captured
    adapters = None
    encoder = None

    def __init__(
        self, spec: TransformersSpec, causal: nn.Module, base: str, *, dtype: str, device: str, linears: str
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.num_parameters = spec.num_parameters
        linears_bytes = prepare_linears(causal, getattr(torch, linears))
        self.weights_bytes = linears_bytes + sum(parameter.nbytes for parameter in causal.parameters())
        self._base: nn.Module = getattr(causal, base)
        self._head = TransformersHead(causal, base)
        self.pooler = PoolerBlock(spec.pooler, None, getattr(torch, dtype))
        cos_sin = cos_sin_table(None, 1).to(device)  # the modules rotate queries and keys themselves
        self._layers = [_PagedLayer(call, cos_sin) for call in spec.calls]

    def traced(self, kv_caches: Sequence[LayerKV]) -> Self:
        return self

    def embed(self, input_ids: Tensor, adapters: Tensor | None = None) -> Tensor:
        table: Any = self._base.get_input_embeddings
        embeds: Tensor = table()(input_ids)
        return embeds

    def forward(self, step: ForwardStep) -> Any:
        """Return the base model's output object, whose last_hidden_state is [1, T, H]."""
        if step.input_embeds is None:
            inputs = {"input_ids": step.input_ids[None]}
        else:
            inputs = {"inputs_embeds": step.input_embeds.clone()[None]}
        token = _pass.set(_Pass(self._layers, step))
        try:
            return self._base(**inputs, position_ids=step.positions[None], use_cache=False)
        finally:
            _pass.reset(token)

    def final_hidden(self, hidden: Any, tokens: Tensor | slice) -> Tensor:
        states: Tensor = hidden.last_hidden_state
        return states[0, tokens]

    def compute_logits(self, hidden: Any, tokens: Tensor | None = None) -> Tensor:
        if tokens is None:
            return self._head.logits(hidden)
        if not len(tokens):  # a step may have prompt chunks only, and heads need not support empty input
            return torch.empty((0, self.spec.vocab_size), dtype=getattr(torch, self.dtype), device=self.device)
        return self._head.logits(replace(hidden, last_hidden_state=hidden.last_hidden_state[:, tokens]))


class TransformersHead:
    """Output head of a causal LM of transformers, applied to hidden states that were computed before. Do not use `causal`
    afterwards."""

    def __init__(self, causal: nn.Module, base: str) -> None:
        self._computed = _ComputedBase()
        setattr(causal, base, self._computed)
        self._causal = causal

    def logits(self, hidden: Any) -> Tensor:
        """Return logits [T, V]. `hidden`: output object of the base model, whose last_hidden_state is [1, T, H]."""
        self._computed.output = hidden
        states: Tensor = hidden.last_hidden_state
        ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        try:
            logits: Tensor = self._causal(input_ids=ids, use_cache=False).logits
        finally:
            self._computed.output = None
        return logits[0]


class _ComputedBase(nn.Module):
    output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


class _PreparedLinear(nn.Module):
    """Linear layer of `ops` as a torch module. `like`: the original weight; other modules may read its dtype and device from
    `weight`."""

    def __init__(self, weight: ops.LinearWeight, like: Tensor) -> None:
        super().__init__()
        self._weight = weight
        self.weight = like.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        flat = ops.linear(x.reshape(-1, x.shape[-1]).contiguous(), self._weight)
        return flat.view(*x.shape[:-1], self._weight.out_features)  # also for no tokens, in steps without sampling


class _PreparedEmbedding(nn.Module):
    def __init__(self, weight: ops.LinearWeight) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids.reshape(-1), self._weight).view(*ids.shape, -1)


def round_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights of linear layers to `dtype`, in place. `TransformersModel` with `linears` of that dtype rounds equally."""
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight.data
            weight.copy_(weight.to(dtype))


def prepare_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace linear layers, and embeddings tied to them, by layers of `ops` in `dtype`, freeing each original. Return the bytes of
    their weights.

    Only torch's own classes are replaced, because a derived class computes something else."""
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    embeddings = {id(child.weight): child for *_, child in children if type(child) is nn.Embedding}
    ours: dict[nn.Module, nn.Module] = {}
    num_bytes = 0
    for *_, child in children:
        if type(child) is nn.Linear and child not in ours:
            weight = ops.prepare_linear(
                ops.StoredWeight.dense(child.weight.data.to(dtype), None if child.bias is None else child.bias.data),
                child.weight.dtype,
            )
            num_bytes += weight.nbytes
            ours[child] = _PreparedLinear(weight, child.weight.data)
            if id(child.weight) in embeddings:
                ours[embeddings[id(child.weight)]] = _PreparedEmbedding(weight)
            child.register_parameter("weight", None)
            child.register_parameter("bias", None)
    for parent, name, child in children:
        if child in ours:
            setattr(parent, name, ours[child])
    return num_bytes
