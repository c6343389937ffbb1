"""Command R and Command R7B: attention and MLP in parallel after one layer norm without bias, and scaled logits. In Command R7B
only layers with a window have a rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.read.hf_config import (
    FULL,
    HfConfig,
    activation,
    decoder,
    every,
    heads,
    layer_types,
    num_layers,
    rope,
    window,
)
from runtime.models.spec.attention import Attention, NormScope, QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import ParallelLayer
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import InterleavedRope, transform


def cohere(config: HfConfig) -> DecoderSpec:
    return _cohere(
        config.with_defaults(rope_theta=500000.0), "CohereForCausalLM", norms=config.flag("use_qk_norm", False)
    )


def cohere2(config: HfConfig) -> DecoderSpec:
    config = config.with_unsaid(sliding_window=4096)
    types = layer_types(config, every(config.count("sliding_window_pattern", 4)))
    windowed = config.get("sliding_window") is not None

    def change(index: int, attention: Attention) -> Attention:
        rotary = attention.rope if windowed and types[index] != FULL else None
        return replace(attention, rope=rotary, window=window(config, types[index]))

    return _cohere(config, "Cohere2ForCausalLM", norms=False).with_mixers(change)


def _cohere(config: HfConfig, architecture: str, *, norms: bool) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=8192)
    num_heads, num_kv_heads, head_size = heads(config)
    norm, bias = LayerNorm(config.number("layer_norm_eps", 1e-5), bias=False), config.flag("attention_bias", False)
    attention = Attention(
        num_heads,
        num_kv_heads,
        head_size,
        rope(config, head_size),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QKNorm(norm, NormScope.EACH_HEAD) if norms else None,
    )
    layer = ParallelLayer(attention, GatedMLP(config.count("intermediate_size"), activation=activation(config)), norm)
    rules = (
        *LLAMA_RULES,
        transform("qkv_proj", InterleavedRope(num_heads + num_kv_heads, head_size, head_size)),
        transform("q_norm", InterleavedRope(num_heads, head_size, head_size, by_head=True)),
        transform("k_norm", InterleavedRope(num_kv_heads, head_size, head_size, by_head=True)),
    )
    layers = [layer] * num_layers(config)
    scale = config.number("logit_scale", 0.0625)
    return decoder(config, architecture, layers, norm, tied=True, logit_scale=scale, rules=rules)


ARCHITECTURES = {"CohereForCausalLM": cohere, "Cohere2ForCausalLM": cohere2}
