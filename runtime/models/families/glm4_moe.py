"""GLM-4.5 and 4.6: Llama that rotates half of each head, dense layers first, then experts beside a shared one."""

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
from runtime.models.spec.decoder import DecoderSpec, layer_name
from runtime.models.spec.mlp import GatedMLP, MoE


def glm4_moe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5
    )
    router = sigmoid_router(config.with_defaults(num_experts_per_tok=8))
    size = config.count("moe_intermediate_size", 1408)
    shared = GatedMLP(config.count("n_shared_experts", 1) * size, name="mlp.shared_expert")
    spec = llama(config, "Glm4MoeForCausalLM")
    attention = replace(spec.attention, output_bias=False)
    if config.flag("use_qk_norm", False):
        attention = replace(attention, qk_norm=QKNorm(spec.norm))
    dense = config.count_or_zero("first_k_dense_replace", 1)
    moe = checked_moe(MoE(num_experts(config, 128), size, router, shared))
    spec = with_mlps(spec.with_mixers(lambda *_: attention), moe, lambda i: i >= dense)
    # The layer beyond the last predicts a further token: no part of the model itself.
    spec = replace(spec, ignored_below=(f"{layer_name(len(spec.layers))}.",))
    return with_expert_rules(spec, SHARED_EXPERTS)


MTP = {"Glm4MoeForCausalLM": beyond_the_last}
ARCHITECTURES = {"Glm4MoeForCausalLM": glm4_moe}
