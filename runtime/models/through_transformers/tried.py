"""Architectures that were tried, with transformers 5.23: a tiny model of each, saved by it, computes in our steps what it computes
alone.

What else transformers builds is looked at when it is asked for, and may run as well. Known without importing transformers, since
building one model of each takes most of a minute; tests/nightly/test_tried.py does, and holds the list to it."""

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

# Of encoders, in tests/equality/test_other_encoders.py.
ENCODERS = tuple(
    f"{name}{ending}"
    for name in ("Albert", "ConvBert", "Deberta", "DebertaV2", "Electra", "Ernie", "XLM")
    for ending in ("Model", "ForSequenceClassification", "ForTokenClassification")
)
