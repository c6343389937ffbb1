"""Qwen2-VL and Qwen2.5-VL: a vision encoder for images and videos of any size, and Qwen2 with M-RoPE."""

from __future__ import annotations

from runtime.encode.rope_positions import VisionPositions
from runtime.models.families.qwen import qwen2
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mrope import by_sections, with_axes, without_mrope
from runtime.models.read.text_part import seeing, text_part
from runtime.models.spec.decoder import DecoderSpec

_UNSAID = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}  # fmt: skip


def qwen2_vl(config: HfConfig) -> DecoderSpec:
    return _vl(config, "Qwen2VLForConditionalGeneration", None)


def qwen2_5_vl(config: HfConfig) -> DecoderSpec:
    tokens_per_second = config.section("vision_config").number("tokens_per_second", 4.0)
    return _vl(config, "Qwen2_5_VLForConditionalGeneration", tokens_per_second)


def _vl(config: HfConfig, architecture: str, tokens_per_second: float | None) -> DecoderSpec:
    # Configs on the hub have the text's fields at top level.
    whole = config if config.get("text_config") else config.changed(text_config=config.values)
    merge_size = config.section("vision_config").count("spatial_merge_size", 2)
    spec = text_part(whole, lambda text: qwen2(without_mrope(text)), architecture, **_UNSAID)
    spec = with_axes(spec, by_sections(whole.section("text_config"), (16, 24, 24)))
    positions = VisionPositions(merge_size, tokens_per_second)
    return seeing(spec, config, "image", "video", rope_positions=positions, is_packed=True)


ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen2_5_vl,
}
