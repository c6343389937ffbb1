"""Helium: Llama that rotates adjacent pairs of dims."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.weights.rules import InterleavedRope, transform


def helium(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=100000.0
    )
    spec = llama(config, "HeliumForCausalLM").with_attention(output_bias=False)
    heads = spec.attention
    pairs = InterleavedRope(heads.num_heads + heads.num_kv_heads, heads.head_size, heads.head_size)
    return replace(spec, rules=(*LLAMA_RULES, transform("qkv_proj", pairs)))


ARCHITECTURES = {"HeliumForCausalLM": helium}
