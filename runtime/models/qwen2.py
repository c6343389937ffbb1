"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.hf_config import HfConfig, sliding_window
from runtime.models.llama import llama
from runtime.models.spec import Attention, DecoderSpec


def qwen2(config: HfConfig) -> DecoderSpec:
    spec = llama(config.with_defaults(max_position_embeddings=32768))
    attention = replace(spec.layers[0].attention, qkv_bias=True, output_bias=False)
    return with_attention(replace(spec, architecture="Qwen2ForCausalLM"), attention, config)


def with_attention(spec: DecoderSpec, attention: Attention, config: HfConfig) -> DecoderSpec:
    """All layers attend alike; where some of them would look through a window, the context ends with it."""
    num_layers = len(spec.layers)
    windowed = config.flag("use_sliding_window", False) and config.count("max_window_layers", 28) < num_layers
    window = sliding_window(config, num_layers) if windowed or config.get("layer_types") else None
    return replace(
        spec,
        layers=tuple(replace(layer, attention=attention) for layer in spec.layers),
        max_model_len=spec.max_model_len if window is None else min(spec.max_model_len, window),
    )
