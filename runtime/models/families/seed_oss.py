"""Seed-OSS: Llama with biases on q, k and v, and an explicit head size."""

from __future__ import annotations

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec


def seed_oss(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True
    )
    return llama(config, "SeedOssForCausalLM").with_attention(output_bias=config.flag("attention_out_bias", False))


ARCHITECTURES = {"SeedOssForCausalLM": seed_oss}
