"""Phi-3 and Phi-4: Llama with q, k and v in one stored matrix, gate and up in another; partial RoPE or LongRoPE.

Phi-3.5-MoE: layer norms, more biases than Llama, and two experts per token that are selected one after the other."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig, rope_parameters, window
from runtime.models.read.mixture import MIXTRAL, STACKED, checked_moe, num_experts
from runtime.models.spec.decoder import TIED_HEAD_BIAS, DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import MoE, Router
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.models.spec.rope import LongRopeScaling, Rope
from runtime.weights.rules import rename


def phi3(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, attention_bias=False)
    return replace(llama(config, "Phi3ForCausalLM").with_attention(window=window(config)), rules=())


def phimoe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6
    )
    if config.count("num_experts_per_tok", 2) != 2:
        raise UnsupportedModel("config: num_experts_per_tok must be 2 for Phi's sparse mixer")
    spec = llama(config, "PhimoeForCausalLM")
    norm = LayerNorm(config.number("rms_norm_eps"))
    attention = spec.attention
    assert attention.rope is not None
    attention = replace(attention, rope=_phimoe_rope(config, attention.rope), window=window(config))
    router = Router(2, "sparsemixer", jitter=config.number("router_jitter_noise", 0.01))
    moe = checked_moe(MoE(num_experts(config, 16), config.count("intermediate_size"), router))
    return replace(
        spec.with_layers(lambda _, layer: Layer(attention, moe, norm)),
        norm=norm,
        head_bias=config.flag("lm_head_bias", False),
        rules=(TIED_HEAD_BIAS, *MIXTRAL),
        other_rules=((TIED_HEAD_BIAS, *STACKED, rename("mlp.router", into="mlp.gate")),),
    )


def _phimoe_rope(config: HfConfig, rope: Rope) -> Rope:
    """Return `rope` with the config's `short_mscale` as LongRoPE's attention factor. Raises UnsupportedModel if `long_mscale`
    differs."""
    if not isinstance(rope.scaling, LongRopeScaling):
        return rope
    short, long = (rope_parameters(config).number(key) for key in ("short_mscale", "long_mscale"))
    if short != long:
        raise UnsupportedModel(f"config: a short_mscale {short} that is not the long_mscale {long} is not supported")
    return replace(rope, scaling=replace(rope.scaling, attention_factor=short))


ARCHITECTURES = {
    "Phi3ForCausalLM": phi3,
    "PhimoeForCausalLM": phimoe,
}
