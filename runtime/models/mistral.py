"""Mistral: Llama without biases, with a sliding window in its first generation."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.hf_config import HfConfig, sliding_window
from runtime.models.llama import llama
from runtime.models.spec import DecoderSpec


def mistral(config: HfConfig) -> DecoderSpec:
    spec = llama(config.with_defaults(num_key_value_heads=8, max_position_embeddings=131072))
    # A config that does not mention the window means 4096; only null means none.
    window = sliding_window(config, len(spec.layers)) if "sliding_window" in config else 4096
    # Within its window a windowed layer sees everything, so up to there full attention is exact.
    limit = spec.max_model_len if window is None else min(spec.max_model_len, window)
    return replace(spec, architecture="MistralForCausalLM", max_model_len=limit)
