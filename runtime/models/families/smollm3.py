"""SmolLM3: Llama without a rotary embedding in every fourth layer, which may have a window instead."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import FULL, SLIDING, HfConfig, layer_types, num_layers, window
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel


def smollm3(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6)
    rotated, windowed = _rotated(config), config.flag("use_sliding_window", False)
    types = layer_types(config, lambda index: SLIDING if windowed and not rotated[index] else FULL)

    def change(index: int, attention: Attention) -> Attention:
        size = window(config, types[index]) if windowed else None
        return replace(attention, rope=attention.rope if rotated[index] else None, window=size)

    return llama(config, "SmolLM3ForCausalLM", tied=True).with_mixers(change)


def _rotated(config: HfConfig) -> list[bool]:
    count, listed, interval = (
        num_layers(config),
        config.get("no_rope_layers"),
        config.count("no_rope_layer_interval", 4),
    )
    if listed is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(each in (0, 1) for each in listed):
        raise UnsupportedModel(f"config: no_rope_layers is not {count} times 0 or 1")
    return [bool(each) for each in listed[:count]]


ARCHITECTURES = {"SmolLM3ForCausalLM": smollm3}
