"""The text of models that also see: Gemma 3, Mistral 3 and Ministral 3, Qwen3.5. What their images pass through is not loaded.

Their config keeps that of the text in a section, their checkpoints its tensors below one of two names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from runtime.models.families.gemma import gemma3
from runtime.models.families.mistral import ministral3, mistral
from runtime.models.families.qwen3_next import qwen3_5, qwen3_5_moe
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import rename

_FIRST = (rename("language_model.model", into="model"), rename("language_model.lm_head", into="lm_head"))
_SECOND = (rename("model.language_model", into="model"),)
_SIGHT = ("vision_tower.", "multi_modal_projector.", "visual.")
_GEMMA = {  # what its configs do not say
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
}  # fmt: skip


def gemma3_text(config: HfConfig) -> DecoderSpec:
    return _text(config, gemma3, "Gemma3ForConditionalGeneration", **_GEMMA)


def mistral3_text(config: HfConfig) -> DecoderSpec:
    families = {"mistral": mistral, "ministral3": ministral3}
    kind = config.section("text_config").with_defaults(model_type="mistral").get("model_type")
    if kind not in families:
        raise UnsupportedModel(f"config: text_config is of model_type {kind!r}; supported: {', '.join(families)}")
    return _text(config, families[kind], "Mistral3ForConditionalGeneration")


def qwen3_5_text(config: HfConfig) -> DecoderSpec:
    return _text(config, qwen3_5, "Qwen3_5ForConditionalGeneration")


def qwen3_5_moe_text(config: HfConfig) -> DecoderSpec:
    return _text(config, qwen3_5_moe, "Qwen3_5MoeForConditionalGeneration")


def _text(
    config: HfConfig, family: Callable[[HfConfig], DecoderSpec], architecture: str, **defaults: Any
) -> DecoderSpec:
    text = config.section("text_config").with_defaults(**defaults)
    if config.get("tie_word_embeddings") is not None:  # of the whole model, whatever the section says
        text = text.changed(tie_word_embeddings=config.get("tie_word_embeddings"))
    spec = family(text)
    first, *others = ((*rules, *names) for rules in (spec.rules, *spec.other_rules) for names in (_FIRST, _SECOND))
    sight = (*_SIGHT, *(f"model.{name}" for name in _SIGHT))
    return replace(
        spec, architecture=architecture, rules=first, other_rules=tuple(others), ignored_below=(*spec.ignored_below, *sight)
    )  # fmt: skip


ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": gemma3_text,
    "Mistral3ForConditionalGeneration": mistral3_text,
    "Qwen3_5ForConditionalGeneration": qwen3_5_text,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_text,
}
