"""Vision models that consist of an encoder, a projector and a decoder of any family.

LLaVA 1.5, LLaVA-NeXT, VipLLaVA, LLaVA-OneVision, InternVL 2.5 to 3.5 in transformers' format, Idefics 3 and SmolVLM."""

from __future__ import annotations

from runtime.models.families.gemma import gemma, gemma2
from runtime.models.families.llama import llama
from runtime.models.families.mistral import mistral
from runtime.models.families.qwen import qwen2, qwen3
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import Family, seeing, text_of_any
from runtime.models.spec.decoder import DecoderSpec

TEXTS: dict[str, Family] = {
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma": gemma, "gemma2": gemma2,
}  # fmt: skip


def _seeing(architecture: str, text: str = "llama", *modalities: str) -> Family:

    def family(config: HfConfig) -> DecoderSpec:
        return seeing(text_of_any(config, TEXTS, architecture, text), config, *modalities)

    return family


_OF_LLAMA = ("Llava", "LlavaNext", "VipLlava", "Idefics3", "SmolVLM")
ARCHITECTURES = {
    **{f"{name}ForConditionalGeneration": _seeing(f"{name}ForConditionalGeneration") for name in _OF_LLAMA},
    "LlavaOnevisionForConditionalGeneration": _seeing(
        "LlavaOnevisionForConditionalGeneration", "qwen2", "image", "video"
    ),
    "InternVLForConditionalGeneration": _seeing("InternVLForConditionalGeneration", "qwen2"),
}
