"""ERNIE 4.5, dense: Llama that rotates neighbouring pairs of dims."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.weights.rules import InterleavedRope, transform


def ernie45(config: HfConfig) -> DecoderSpec:
    bias = config.flag("use_bias", False)
    config = config.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        attention_bias=bias,
        mlp_bias=bias,
    )
    spec = llama(config, "Ernie4_5ForCausalLM", tied=True)
    heads = spec.attention
    pairs = InterleavedRope(heads.num_heads + heads.num_kv_heads, heads.head_size, heads.head_size)
    return replace(spec, rules=(*LLAMA_RULES, transform("qkv_proj", pairs)))


ARCHITECTURES = {"Ernie4_5ForCausalLM": ernie45}
