"""EXAONE 4: norms after each block and of each head's q and k. In models with windows, layers without a window have no RoPE."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import FULL, HfConfig, every, layer_types, window
from runtime.models.spec.attention import Attention, QKNorm
from runtime.models.spec.decoder import DecoderSpec

_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


def exaone4(config: HfConfig) -> DecoderSpec:
    config = config.with_unsaid(sliding_window=4096, rms_norm_eps=1e-5)
    spec = llama(config, "Exaone4ForCausalLM")
    hybrid = config.get("sliding_window") is not None
    types = layer_types(config, every(config.count("sliding_window_pattern", 4)) if hybrid else lambda _: FULL)

    def change(index: int, attention: Attention) -> Attention:
        kind, attention = types[index], replace(attention, qk_norm=QKNorm(spec.norm))
        if not hybrid:
            return attention
        return replace(attention, rope=None if kind == FULL else attention.rope, window=window(config, kind))

    return spec.with_mixers(change).with_layers(lambda _, layer: replace(layer, before=None, after=_AFTER))


ARCHITECTURES = {"Exaone4ForCausalLM": exaone4}
