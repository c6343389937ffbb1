"""PaliGemma 1 and 2: SigLIP and a projector, then Gemma 1 or 2; all tokens of a prompt attend to each other."""

from __future__ import annotations

from runtime.models.families.gemma import gemma, gemma2
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.text_part import seeing, text_of_any
from runtime.models.spec.attention import Mask
from runtime.models.spec.decoder import DecoderSpec

_UNSAID = {
    "vocab_size": 257152, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 1,
}  # fmt: skip


def paligemma(config: HfConfig) -> DecoderSpec:
    text = config.section("text_config")
    if text.get("model_type") in (None, "gemma"):
        text = text.with_defaults(**_UNSAID)
    config = config.with_defaults(tie_word_embeddings=True)
    spec = text_of_any(
        config.changed(text_config=text.changed(use_bidirectional_attention=False).values),
        {"gemma": gemma, "gemma2": gemma2},
        "PaliGemmaForConditionalGeneration",
        "gemma",
    )
    spec = spec.with_attention(mask=Mask.PREFIX_FULL)
    return seeing(spec, config)


ARCHITECTURES = {"PaliGemmaForConditionalGeneration": paligemma}
