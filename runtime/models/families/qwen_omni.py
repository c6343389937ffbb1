"""Qwen2.5-Omni and Qwen3-Omni with text output (the "thinker"). Input is text, images, audio, and videos whose audio may be
interleaved. Speech output (the "talker") is not supported."""

from __future__ import annotations

from runtime.encode.rope_positions import VisionPositions
from runtime.models.families.qwen import qwen2
from runtime.models.families.qwen3_vl import stacked_moe
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mrope import by_sections, interleaved, with_axes, without_mrope
from runtime.models.read.text_part import seeing, text_part
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel

_UNSAID = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1e6,
}  # fmt: skip
_UNSAID_OF_3 = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1e6, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip


def qwen2_5_omni(config: HfConfig) -> DecoderSpec:
    config = _thinker(config, "qwen2_5_omni_thinker")
    spec = text_part(
        config, lambda text: qwen2(without_mrope(text)), "Qwen2_5OmniThinkerForConditionalGeneration", **_UNSAID
    )
    spec = with_axes(spec, by_sections(config.section("text_config"), (16, 24, 24)))
    positions = VisionPositions(
        config.section("vision_config").count("spatial_merge_size", 2),
        float(config.number("position_id_per_seconds", 25.0)),
        behind_time=True,
        shares_ends=True,
    )
    return seeing(spec, config, "image", "video", "audio", rope_positions=positions, is_packed=True)


def qwen3_omni_moe(config: HfConfig) -> DecoderSpec:
    """Return the spec of Qwen3-Omni MoE. Frames of videos must have integer positions, as those of videos with two frames a
    second do."""
    config = _thinker(config, "qwen3_omni_moe_thinker")
    vision = config.section("vision_config").with_defaults(deepstack_visual_indexes=[8, 16, 24])
    depths = vision.get("deepstack_visual_indexes")
    spec = text_part(
        config, lambda text: stacked_moe(without_mrope(text)), "Qwen3OmniMoeThinkerForConditionalGeneration",
        **_UNSAID_OF_3,
    )  # fmt: skip
    if not isinstance(depths, list) or len(depths) > len(spec.layers):
        raise UnsupportedModel(f"config: deepstack_visual_indexes are {depths!r}, for {len(spec.layers)} layers")
    spec = with_axes(spec, interleaved(config.section("text_config"), (24, 20, 20), spec))
    positions = VisionPositions(
        vision.count("spatial_merge_size", 2),
        float(config.number("position_id_per_seconds", 25.0)),
        behind_time=True,
        whole_times=True,
    )
    return seeing(
        spec, config, "image", "video", "audio", rope_positions=positions, is_packed=True, num_deepstack=len(depths)
    )


def _thinker(config: HfConfig, model_type: str) -> HfConfig:
    thinker = config.section("thinker_config") if config.get("thinker_config") else config
    return thinker.with_defaults(model_type=model_type)


ARCHITECTURES = {
    "Qwen2_5OmniModel": qwen2_5_omni,
    "Qwen2_5OmniForConditionalGeneration": qwen2_5_omni,
    "Qwen2_5OmniThinkerForConditionalGeneration": qwen2_5_omni,
    "Qwen3OmniMoeForConditionalGeneration": qwen3_omni_moe,
    "Qwen3OmniMoeThinkerForConditionalGeneration": qwen3_omni_moe,
}
