"""Phi-4 multimodal in transformers' format: Phi-4 mini with an image encoder, which reads crops, and an audio encoder.

If a prompt contains images, its audio uses another projection. The vision and speech LoRA adapters are served like any adapter;
`--default-mm-loras` selects the adapters for prompts with images or audio."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.phi3 import phi3
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing
from runtime.models.spec.decoder import DecoderSpec


def phi4_multimodal(config: HfConfig) -> DecoderSpec:
    spec = phi3(config.with_defaults(max_position_embeddings=131072, original_max_position_embeddings=4096))
    spec = replace(spec, architecture="Phi4MultimodalForCausalLM")
    return seeing(spec, config, "image", "audio", stored_below=("model.embed_tokens_extend.",), apart=True)


ARCHITECTURES = {"Phi4MultimodalForCausalLM": phi4_multimodal}
