"""Bamba: Llama with half of each head rotated, and Mamba-2 mixers instead of attention in most layers."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.hybrid import bamba_mixer, indices
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Mixer
from runtime.weights.rules import rename

NORMS = ("input_layernorm", "pre_ff_layernorm")
RULES = (*LLAMA_RULES, rename("feed_forward", into="mlp"), rename("model.final_layernorm", into="model.norm"))


def bamba(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=262144, rms_norm_eps=1e-5, partial_rotary_factor=0.5
    )
    spec = llama(config, "BambaForCausalLM")
    mixer, with_attention = bamba_mixer(config), indices(config, "attn_layer_indices")

    def mix(index: int, attention: Attention) -> Mixer:
        return attention if index in with_attention else mixer

    spec = spec.with_mixers(mix).with_layers(lambda _, layer: replace(layer, before=NORMS))
    return replace(spec, rules=RULES)


ARCHITECTURES = {"BambaForCausalLM": bamba}
