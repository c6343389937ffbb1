"""Granite Speech: a conformer over spectra, whose outputs a query transformer takes window by window, before Granite.

Published ones bring an adapter (LoRA) that requests with sound need; it is served as any other is, and
`--default-mm-loras` has it taken where there is sound."""

from __future__ import annotations

from runtime.models.families.granite import granite
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing, text_part
from runtime.models.spec.decoder import DecoderSpec

_UNSAID = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
_STORED_BELOW = ("encoder.", "projector.", "model.encoder.", "model.projector.")


def granite_speech(config: HfConfig) -> DecoderSpec:
    spec = text_part(config, granite, "GraniteSpeechForConditionalGeneration", **_UNSAID)
    return seeing(spec, config, "audio", stored_below=_STORED_BELOW, multiplier=spec.embedding_multiplier)


ARCHITECTURES = {"GraniteSpeechForConditionalGeneration": granite_speech}
