"""Architectures that were tested with transformers 5.23: a tiny model of each computes the same here and in transformers.

Other architectures are traced when they are requested, and may work too. The list is static, because building a model of each takes
most of a minute. tests/nightly/test_tried.py builds them and checks the list."""

from __future__ import annotations

ARCHITECTURES = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "AriaTextForCausalLM",
    "AXK1ForCausalLM",
    "BeamForCausalLM",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "Cohere2MoeForCausalLM",
    "CTRLLMHeadModel",
    "CwmForCausalLM",
    "DiffLlamaForCausalLM",
    "Dots1ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "FlintForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GPTBigCodeForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteSWAForCausalLM",
    "HrmTextForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "HYV3ForCausalLM",
    "Jais2ForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "MellumForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniCPM3ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "ModernBertDecoderForCausalLM",
    "MoshiForCausalLM",
    "NanoChatForCausalLM",
    "PersimmonForCausalLM",
    "SolarOpenForCausalLM",
    "VaultGemmaForCausalLM",
    "YoutuForCausalLM",
)

# Encoders, tested in tests/equality/test_other_encoders.py.
ENCODERS = tuple(
    f"{name}{ending}"
    for name in ("Albert", "ConvBert", "Deberta", "DebertaV2", "Electra", "Ernie", "XLM")
    for ending in ("Model", "ForSequenceClassification", "ForTokenClassification")
)
