"""Qwen3, dense: Llama with an RMS norm on each head's q and k, and heads of their own size."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.families.qwen2 import with_attention
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.attention import QKNorm
from runtime.models.spec.decoder import DecoderSpec


def qwen3(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=32768, head_dim=128)
    spec = llama(config, "Qwen3ForCausalLM")
    return with_attention(spec, replace(spec.attention, qk_norm=QKNorm(spec.norm)), config)


ARCHITECTURES = {"Qwen3ForCausalLM": qwen3}
