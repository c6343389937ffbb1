"""Voxtral: Whisper's encoder over thirty seconds of sound at a time, four of its outputs joined to one token, before Llama."""

from __future__ import annotations

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing, text_part
from runtime.models.spec.decoder import DecoderSpec

_UNSAID = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e8, "head_dim": 128,
}  # fmt: skip


def voxtral(config: HfConfig) -> DecoderSpec:
    return seeing(text_part(config, llama, "VoxtralForConditionalGeneration", **_UNSAID), config, "audio")


ARCHITECTURES = {"VoxtralForConditionalGeneration": voxtral}
