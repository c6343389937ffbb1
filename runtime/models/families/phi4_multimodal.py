"""Phi-4 multimodal, as transformers writes it: pictures in crops, and sounds, before Phi-4 mini. Sounds beside pictures go through
another projection than alone.

What it sees and hears it understands by adapters (LoRA), one for each, which are served as any others are;
`--default-mm-loras` says which one to take where there are pictures, or sounds."""

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
