"""InternVL 2.5 to 3.5, as transformers writes them: a vision tower of their own, whose patches are joined four by four."""

from __future__ import annotations

from runtime.models.families.llava import TEXTS
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing, text_of_any
from runtime.models.spec.decoder import DecoderSpec


def internvl(config: HfConfig) -> DecoderSpec:
    return seeing(text_of_any(config, TEXTS, "InternVLForConditionalGeneration", "qwen2"), config)


ARCHITECTURES = {"InternVLForConditionalGeneration": internvl}
