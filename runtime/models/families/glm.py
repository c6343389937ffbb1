"""GLM-4: Llama that rotates half of each head, in neighbouring pairs; from version 0414 on with norms behind each block too."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
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
    spec = llama(config, architecture)
    attention = replace(spec.attention, output_bias=False)
    spec = spec.with_mixers(lambda *_: attention)
    assert attention.rope is not None
    pairs = InterleavedRope(attention.num_heads + attention.num_kv_heads, attention.head_size, attention.rope.dim)
    return replace(spec, rules=(LLAMA_RULES[0], transform("qkv_proj", pairs)))


ARCHITECTURES = {"GlmForCausalLM": glm, "Glm4ForCausalLM": glm4}
