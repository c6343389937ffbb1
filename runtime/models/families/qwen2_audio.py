"""Qwen2-Audio: Whisper's encoder, whose outputs are joined two by two, and a projector before Qwen2."""

from __future__ import annotations

from runtime.models.families.qwen2 import qwen2
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing, text_of_any
from runtime.models.spec.decoder import DecoderSpec


def qwen2_audio(config: HfConfig) -> DecoderSpec:
    return seeing(text_of_any(config, {"qwen2": qwen2}, "Qwen2AudioForConditionalGeneration", "qwen2"), config, "audio")


ARCHITECTURES = {"Qwen2AudioForConditionalGeneration": qwen2_audio}
