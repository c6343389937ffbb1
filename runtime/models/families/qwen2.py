"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and perhaps windows in its upper layers."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import FULL, SLIDING, HfConfig, layer_types, window
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec


def qwen2(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=32768)
    spec = llama(config, "Qwen2ForCausalLM")
    return with_attention(spec, replace(spec.attention, qkv_bias=True, output_bias=False), config)


def with_attention(spec: DecoderSpec, attention: Attention, config: HfConfig) -> DecoderSpec:
    """All layers attend alike, but for the windows that some of them look through."""
    first = (
        config.count_or_zero("max_window_layers", 28) if config.flag("use_sliding_window", False) else len(spec.layers)
    )
    types = layer_types(config, lambda index: SLIDING if index >= first else FULL)
    by_type = {each: replace(attention, window=window(config, each)) for each in types}
    return spec.with_mixers(lambda index, _: by_type[types[index]])


ARCHITECTURES = {"Qwen2ForCausalLM": qwen2}
