"""Models that combine an audio encoder with a decoder: Whisper's encoder (Qwen2-Audio, Voxtral), or a conformer (Granite Speech).

Requests with audio to Granite Speech need the LoRA adapter with which it is published. The adapter is served like any adapter,
and `--default-mm-loras` selects it for audio."""

from __future__ import annotations

from runtime.models.families.granite import granite
from runtime.models.families.llama import llama
from runtime.models.families.qwen import qwen2
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing, text_of_any, text_part
from runtime.models.spec.decoder import DecoderSpec


def qwen2_audio(config: HfConfig) -> DecoderSpec:
    return seeing(text_of_any(config, {"qwen2": qwen2}, "Qwen2AudioForConditionalGeneration", "qwen2"), config, "audio")


_VOXTRAL = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e8, "head_dim": 128,
}  # fmt: skip


def voxtral(config: HfConfig) -> DecoderSpec:
    return seeing(text_part(config, llama, "VoxtralForConditionalGeneration", **_VOXTRAL), config, "audio")


_GRANITE = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
_STORED_BELOW = ("encoder.", "projector.", "model.encoder.", "model.projector.")


def granite_speech(config: HfConfig) -> DecoderSpec:
    spec = text_part(config, granite, "GraniteSpeechForConditionalGeneration", **_GRANITE)
    return seeing(spec, config, "audio", stored_below=_STORED_BELOW, multiplier=spec.embedding_multiplier)


ARCHITECTURES = {
    "Qwen2AudioForConditionalGeneration": qwen2_audio,
    "VoxtralForConditionalGeneration": voxtral,
    "GraniteSpeechForConditionalGeneration": granite_speech,
}
