"""GLM-4: Llama that rotates half of each head's dims, in adjacent pairs. Version 0414 also has norms after each block.

GLM-4.5 and 4.6: Llama that rotates half of each head's dims, with experts and a shared expert after the first layers."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mixture import (
    SHARED_EXPERTS,
    checked_moe,
    num_experts,
    sigmoid_router,
    with_expert_rules,
    with_mlps,
)
from runtime.models.read.mtp import beyond_the_last
from runtime.models.spec.attention import QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec, layer_name
from runtime.models.spec.mlp import GatedMLP, MoE
from runtime.weights.rules import InterleavedRope, transform

_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")


def glm(config: HfConfig) -> DecoderSpec:
    return _glm(config, "GlmForCausalLM")


def glm4(config: HfConfig) -> DecoderSpec:
    spec = _glm(config, "Glm4ForCausalLM")
    return spec.with_layers(lambda _, layer: replace(layer, after=_AFTER))


def _glm(config: HfConfig, architecture: str) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-07,
        partial_rotary_factor=0.5,
        attention_bias=True,
    )
    spec = llama(config, architecture).with_attention(output_bias=False)
    attention = spec.attention
    assert attention.rope is not None
    pairs = InterleavedRope(attention.num_heads + attention.num_kv_heads, attention.head_size, attention.rope.dim)
    return replace(spec, rules=(LLAMA_RULES[0], transform("qkv_proj", pairs)))


def glm4_moe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5
    )
    router = sigmoid_router(config.with_defaults(num_experts_per_tok=8))
    size = config.count("moe_intermediate_size", 1408)
    shared = GatedMLP(config.count("n_shared_experts", 1) * size, name="mlp.shared_expert")
    spec = llama(config, "Glm4MoeForCausalLM")
    qk_norm = QKNorm(spec.norm) if config.flag("use_qk_norm", False) else None
    dense = config.count_or_zero("first_k_dense_replace", 1)
    moe = checked_moe(MoE(num_experts(config, 128), size, router, shared))
    spec = with_mlps(spec.with_attention(output_bias=False, qk_norm=qk_norm), moe, lambda i: i >= dense)
    # The layer after the last one is an MTP module and not part of the model.
    spec = replace(spec, ignored_below=(f"{layer_name(len(spec.layers))}.",))
    return with_expert_rules(spec, SHARED_EXPERTS)


MTP = {
    "Glm4MoeForCausalLM": beyond_the_last,
}
ARCHITECTURES = {
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
}
