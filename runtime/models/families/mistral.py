"""Mistral: Llama without biases. The first Mistral has a sliding window in all layers, Ministral in some layers.

Ministral 3: queries are scaled by their position. Mixtral: each MLP is replaced by eight experts, of which a token uses two."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import FULL, SLIDING, HfConfig, layer_types, window
from runtime.models.read.mixture import MIXTRAL, STACKED, STACKED_BY_KIND, checked_moe, num_experts, with_mlps
from runtime.models.spec.attention import AttentionTemperature
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.mlp import MoE, Router

_ROPE_3 = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def mistral(config: HfConfig) -> DecoderSpec:
    config = _with_defaults(config)
    return llama(config, "MistralForCausalLM").with_attention(window=window(config))


def ministral(config: HfConfig) -> DecoderSpec:
    config = _with_defaults(config)
    spec = llama(config, "MinistralForCausalLM")
    types = layer_types(config, lambda _: FULL if config.get("sliding_window") is None else SLIDING)
    attention = spec.attention
    by_type = {each: replace(attention, window=window(config, each)) for each in types}
    return spec.with_mixers(lambda index, _: by_type[types[index]])


def ministral3(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5, rope_parameters=_ROPE_3
    )
    spec = llama(config, "Ministral3ForCausalLM")
    rope = config.section("rope_parameters")
    growth = AttentionTemperature(rope.number("llama_4_scaling_beta"), rope.count("original_max_position_embeddings"))
    return spec.with_attention(window=window(config), growth=growth)


def _with_defaults(config: HfConfig) -> HfConfig:
    return config.with_unsaid(sliding_window=4096).with_defaults(num_key_value_heads=8, max_position_embeddings=131072)


def mixtral(config: HfConfig) -> DecoderSpec:
    # Unlike Mistral, it has no window unless its config gives one.
    config = config.with_defaults(rope_theta=1e6, rms_norm_eps=1e-5).with_unsaid(sliding_window=None)
    router = Router(config.count("num_experts_per_tok", 2), renormalize=True)
    moe = MoE(num_experts(config, 8), config.count("intermediate_size"), router)
    spec = with_mlps(mistral(config), checked_moe(moe))
    return replace(spec, architecture="MixtralForCausalLM", rules=MIXTRAL, other_rules=(STACKED, STACKED_BY_KIND))


ARCHITECTURES = {
    "MistralForCausalLM": mistral,
    "MinistralForCausalLM": ministral,
    "Ministral3ForCausalLM": ministral3,
    "MixtralForCausalLM": mixtral,
}
