"""Gemma 3, Mistral 3 and Ministral 3, Qwen3.5: decoders that exist, behind encoders. What is not served of these is not loaded."""

from __future__ import annotations

from runtime.models.families.gemma import gemma3
from runtime.models.families.mistral import ministral3, mistral
from runtime.models.families.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next_mtp
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing, text_of_any, text_part
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec

_GEMMA = {  # what its configs do not say
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
}  # fmt: skip


def gemma3_seeing(config: HfConfig) -> DecoderSpec:
    spec = text_part(config, gemma3, "Gemma3ForConditionalGeneration", **_GEMMA)
    return seeing(spec, config, whole_items=True)


def mistral3(config: HfConfig) -> DecoderSpec:
    families = {"mistral": mistral, "ministral3": ministral3}
    return seeing(text_of_any(config, families, "Mistral3ForConditionalGeneration", "mistral"), config)


def qwen3_5_text(config: HfConfig) -> DecoderSpec:
    return text_part(config, qwen3_5, "Qwen3_5ForConditionalGeneration")


def qwen3_5_moe_text(config: HfConfig) -> DecoderSpec:
    return text_part(config, qwen3_5_moe, "Qwen3_5MoeForConditionalGeneration")


def qwen3_5_text_mtp(config: HfConfig, spec: DecoderSpec) -> DraftHeadSpec:
    return qwen3_next_mtp(config.section("text_config"), spec)


MTP = dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), qwen3_5_text_mtp)
ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": gemma3_seeing,
    "Mistral3ForConditionalGeneration": mistral3,
    "Qwen3_5ForConditionalGeneration": qwen3_5_text,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_text,
}
