"""Qwen3-VL, dense and MoE: interleaved M-RoPE, and features of three depths of the vision encoder that are added in the first
decoder layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from runtime.encode.rope_positions import VisionPositions
from runtime.models.families.qwen import qwen3, qwen3_moe
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mixture import STACKED
from runtime.models.read.mrope import interleaved, with_axes, without_mrope
from runtime.models.read.text_part import seeing, text_part
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import Transposed, transform

_DENSE = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 5e5, "head_dim": 128,
}  # fmt: skip
_COLUMNS = (*STACKED, transform("gate_up.weight", Transposed()), transform("down.weight", Transposed()))
_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e5, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4, "norm_topk_prob": True,
}  # fmt: skip


def qwen3_vl(config: HfConfig) -> DecoderSpec:
    return _vl(config, qwen3, "Qwen3VLForConditionalGeneration", _DENSE)


def qwen3_vl_moe(config: HfConfig) -> DecoderSpec:
    return _vl(config, stacked_moe, "Qwen3VLMoeForConditionalGeneration", _MOE)


def stacked_moe(config: HfConfig) -> DecoderSpec:
    """Return the spec of checkpoints that store all experts of a layer as one transposed tensor."""
    spec = qwen3_moe(config)
    return replace(spec, rules=_COLUMNS, other_rules=(spec.rules, *spec.other_rules))


def _vl(
    config: HfConfig, family: Callable[[HfConfig], DecoderSpec], architecture: str, unsaid: dict[str, Any]
) -> DecoderSpec:
    vision = config.section("vision_config").with_defaults(deepstack_visual_indexes=[8, 16, 24])
    depths = vision.get("deepstack_visual_indexes")
    if not isinstance(depths, list):
        raise UnsupportedModel(f"config: deepstack_visual_indexes are {depths!r}, not a list")
    spec = text_part(config, lambda text: family(without_mrope(text)), architecture, **unsaid)
    if len(depths) > len(spec.layers):
        raise UnsupportedModel(f"config: {len(depths)} deepstack_visual_indexes for {len(spec.layers)} layers")
    spec = with_axes(spec, interleaved(config.section("text_config"), (24, 20, 20), spec))
    positions = VisionPositions(vision.count("spatial_merge_size", 2), by_frame=True)
    return seeing(spec, config, "image", "video", rope_positions=positions, is_packed=True, num_deepstack=len(depths))


ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl_moe,
}
