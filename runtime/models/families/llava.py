"""LLaVA 1.5, LLaVA-NeXT, VipLLaVA and LLaVA-OneVision: a vision tower and a projector before a decoder of another family."""

from __future__ import annotations

from runtime.models.families.gemma import gemma, gemma2
from runtime.models.families.llama import llama
from runtime.models.families.mistral import mistral
from runtime.models.families.qwen2 import qwen2
from runtime.models.families.qwen3 import qwen3
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import Family, seeing, text_of_any
from runtime.models.spec.decoder import DecoderSpec

TEXTS: dict[str, Family] = {
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma": gemma, "gemma2": gemma2,
}  # fmt: skip


def _llava(architecture: str, *modalities: str, text: str = "llama") -> Family:
    def family(config: HfConfig) -> DecoderSpec:
        return seeing(text_of_any(config, TEXTS, architecture, text), config, *modalities)

    return family


ARCHITECTURES = {
    "LlavaForConditionalGeneration": _llava("LlavaForConditionalGeneration"),
    "LlavaNextForConditionalGeneration": _llava("LlavaNextForConditionalGeneration"),
    "VipLlavaForConditionalGeneration": _llava("VipLlavaForConditionalGeneration"),
    "LlavaOnevisionForConditionalGeneration": _llava(
        "LlavaOnevisionForConditionalGeneration", "image", "video", text="qwen2"
    ),
}
