"""Phi-3 and Phi-4: Llama with q, k and v in one stored matrix, gate and up in another; partial RoPE, or LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig, window
from runtime.models.spec.decoder import DecoderSpec


def phi3(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, attention_bias=False)
    spec = llama(config, "Phi3ForCausalLM")
    attention = replace(spec.attention, window=window(config))
    return replace(spec.with_mixers(lambda *_: attention), rules=())


ARCHITECTURES = {"Phi3ForCausalLM": phi3}
