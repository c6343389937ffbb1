"""Idefics 3, SmolVLM and SmolVLM2: SigLIP over the pieces of a picture, whose patches a connector folds, before Llama."""

from __future__ import annotations

from runtime.models.families.llava import TEXTS
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import Family, seeing, text_of_any
from runtime.models.spec.decoder import DecoderSpec


def _idefics(architecture: str) -> Family:
    def family(config: HfConfig) -> DecoderSpec:
        return seeing(text_of_any(config, TEXTS, architecture, "llama"), config)

    return family


ARCHITECTURES = {
    name: _idefics(name) for name in ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
}
