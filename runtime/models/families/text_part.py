"""Multimodal models whose decoder is another family: Gemma 3, Mistral 3, Ministral 3, and Qwen3.5 with images."""

from __future__ import annotations

from runtime.encode.rope_positions import VisionPositions
from runtime.models.families.gemma import gemma3
from runtime.models.families.mistral import ministral3, mistral
from runtime.models.families.qwen3_next import qwen3_5, qwen3_5_moe
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mrope import interleaved, with_axes, without_mrope
from runtime.models.read.text_part import Family, seeing, text_of_any, text_part
from runtime.models.spec.decoder import DecoderSpec

_GEMMA = {  # defaults of keys that its configs omit
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
}  # fmt: skip


def gemma3_seeing(config: HfConfig) -> DecoderSpec:
    spec = text_part(config, gemma3, "Gemma3ForConditionalGeneration", **_GEMMA)
    return seeing(spec, config, whole_items=True)


def mistral3(config: HfConfig) -> DecoderSpec:
    families = {"mistral": mistral, "ministral3": ministral3}
    return seeing(text_of_any(config, families, "Mistral3ForConditionalGeneration", "mistral"), config)


def qwen3_5_seeing(config: HfConfig) -> DecoderSpec:
    return _qwen3_5(config, qwen3_5, "Qwen3_5ForConditionalGeneration")


def qwen3_5_moe_seeing(config: HfConfig) -> DecoderSpec:
    return _qwen3_5(config, qwen3_5_moe, "Qwen3_5MoeForConditionalGeneration")


def _qwen3_5(config: HfConfig, family: Family, architecture: str) -> DecoderSpec:
    spec = text_part(config, lambda text: family(without_mrope(text)), architecture)
    spec = with_axes(spec, interleaved(config.section("text_config"), (11, 11, 10), spec))
    merge_size = config.section("vision_config").count("spatial_merge_size", 2)
    positions = VisionPositions(merge_size, by_frame=True)
    return seeing(spec, config, "image", "video", rope_positions=positions, is_packed=True)


ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": gemma3_seeing,
    "Mistral3ForConditionalGeneration": mistral3,
    "Qwen3_5ForConditionalGeneration": qwen3_5_seeing,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_seeing,
}
