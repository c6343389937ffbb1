"""Granite 3 and 4, dense: Llama with multipliers on embedding, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec


def granite(config: HfConfig) -> DecoderSpec:
    spec = llama(config, "GraniteForCausalLM")
    attention = replace(spec.attention, score_scale=config.number("attention_multiplier", 1.0))
    multiplier = config.number("residual_multiplier", 1.0)
    return replace(
        spec.with_layers(lambda _, layer: replace(layer, mixer=attention, multiplier=multiplier)),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


ARCHITECTURES = {"GraniteForCausalLM": granite}
