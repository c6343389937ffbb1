"""OLMo: layer norms without weights; clipped q, k and v. OLMo 2: norms after each block, and norms of q and k over all heads.

OLMo 3: windows in three of four layers; only the other layers scale their rotary embedding. OLMoE: norms of q and k over all
heads, clipped q, k and v, and many small experts."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import FULL, SLIDING, HfConfig, every, layer_types, local_rope, rope, window
from runtime.models.read.mixture import checked_moe, num_experts, with_expert_rules
from runtime.models.spec.attention import Attention, NormScope, QKNorm
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import MoE, Router
from runtime.models.spec.norm import LayerNorm

_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


def olmo(config: HfConfig) -> DecoderSpec:
    spec, norm = llama(config, "OlmoForCausalLM"), LayerNorm(1e-5, weight=False, bias=False)
    attention = replace(spec.attention, clip=config.number_or_none("clip_qkv"))
    return replace(spec.with_layers(lambda _, layer: replace(layer, mixer=attention, norm=norm)), norm=norm)


def olmo2(config: HfConfig) -> DecoderSpec:
    return _olmo2(config, "Olmo2ForCausalLM")


def olmo3(config: HfConfig) -> DecoderSpec:
    config = config.with_unsaid(sliding_window=4096).with_defaults(rope_theta=500000.0)
    spec, types = _olmo2(config, "Olmo3ForCausalLM"), layer_types(config, every(4))
    head_size = spec.attention.head_size
    ropes = {
        FULL: rope(config, head_size, FULL),
        SLIDING: local_rope(config, head_size, config.number("rope_theta")),
    }

    def change(index: int, attention: Attention) -> Attention:
        return replace(attention, rope=ropes[types[index]], window=window(config, types[index]))

    return spec.with_mixers(change)


def _olmo2(config: HfConfig, architecture: str) -> DecoderSpec:
    spec = llama(config.with_defaults(rms_norm_eps=1e-5), architecture)
    attention = replace(spec.attention, qk_norm=QKNorm(spec.norm, NormScope.ALL_HEADS))
    return spec.with_layers(lambda _, layer: Layer(attention, layer.mlp, layer.norm, None, _AFTER))


def olmoe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    spec = llama(config, "OlmoeForCausalLM")
    clip, qk_norm = config.number_or_none("clip_qkv"), QKNorm(spec.norm, NormScope.ALL_HEADS)
    attention = replace(spec.attention, qk_norm=qk_norm, clip=clip)
    router = Router(config.count("num_experts_per_tok", 8), renormalize=config.flag("norm_topk_prob", False))
    moe = checked_moe(MoE(num_experts(config, 64), config.count("intermediate_size"), router))
    return with_expert_rules(spec.with_layers(lambda _, layer: Layer(attention, moe, layer.norm)))


ARCHITECTURES = {
    "OlmoForCausalLM": olmo,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoeForCausalLM": olmoe,
}
