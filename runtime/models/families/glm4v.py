"""GLM-4.1V and GLM-4.6V Flash: a vision encoder for images and videos of any size, and GLM-4 with M-RoPE."""

from __future__ import annotations

from runtime.encode.rope_positions import VisionPositions
from runtime.models.families.glm import glm4
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mrope import by_sections, with_axes, without_mrope
from runtime.models.read.text_part import seeing, text_part
from runtime.models.spec.decoder import DecoderSpec

_UNSAID = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
}  # fmt: skip


def glm4v(config: HfConfig) -> DecoderSpec:
    spec = text_part(config, _text, "Glm4vForConditionalGeneration", **_UNSAID)
    spec = with_axes(spec, by_sections(config.section("text_config"), (8, 12, 12)))
    positions = VisionPositions(config.section("vision_config").count("spatial_merge_size", 2), by_frame=True)
    return seeing(spec, config, "image", "video", rope_positions=positions, is_packed=True)


def _text(config: HfConfig) -> DecoderSpec:
    head_size = config.count("hidden_size") // config.count("num_attention_heads")
    return glm4(without_mrope(config).changed(head_dim=head_size))


ARCHITECTURES = {"Glm4vForConditionalGeneration": glm4v}
