"""Seed-OSS: Llama with biases on q, k and v, and heads of their own size."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec


def seed_oss(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True
    )
    spec = llama(config, "SeedOssForCausalLM")
    attention = replace(spec.attention, output_bias=config.flag("attention_out_bias", False))
    return spec.with_mixers(lambda *_: attention)


ARCHITECTURES = {"SeedOssForCausalLM": seed_oss}
