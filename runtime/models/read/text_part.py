"""Text decoder of multimodal models, and description of their media encoder.

The config has the decoder's options in a section, and the checkpoint has the decoder's tensors below one of a few prefixes. A
text-only family describes the decoder. Modules of transformers are the encoder (`EncoderSpec`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import EncoderSpec, UnsupportedModel
from runtime.weights.rules import rename

Family = Callable[[HfConfig], DecoderSpec]
_WAYS = (
    (rename("language_model.model", into="model"), rename("language_model.lm_head", into="lm_head")),
    (rename("model.language_model", into="model"),),
    (rename("model.text_model", into="model"),),
    (rename("thinker.model", into="model"), rename("thinker.lm_head", into="lm_head")),
    (),
)
_SENSES = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "visual.", "connector.", "audio_tower.", "image_newline",
)  # fmt: skip
STORED_BELOW = tuple(f"{where}{name}" for where in ("", "model.", "thinker.") for name in _SENSES)
_SPEAKS = ("talker.", "token2wav.", "code2wav.")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# Keys that sections of these kinds omit if they have the default of their class.
_UNSAID: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "llama": (32000, 4096, 11008, 32, 32),
        "mistral": (32000, 4096, 14336, 32, 32),
        "qwen2": (151936, 4096, 22016, 32, 32),
        "qwen3": (151936, 4096, 22016, 32, 32),
        "gemma": (256000, 3072, 24576, 28, 16),
        "gemma2": (256000, 2304, 9216, 26, 8, 4),
    }
)


def text_part(config: HfConfig, family: Family, architecture: str, **defaults: Any) -> DecoderSpec:
    """Return the spec of the text decoder of a multimodal `architecture`. `family`: reads the config's text section. `defaults`:
    values for keys that are missing in that section."""
    text = config.section("text_config").with_defaults(**defaults)
    if config.get("tie_word_embeddings") is not None:  # of the whole model, overrides the section
        text = text.changed(tie_word_embeddings=config.get("tie_word_embeddings"))
    spec = family(text)
    first, *others = ((*rules, *names) for rules in (spec.rules, *spec.other_rules) for names in _WAYS)
    return replace(
        spec, architecture=architecture, rules=first, other_rules=tuple(others),
        ignored_below=(*spec.ignored_below, *STORED_BELOW, *_SPEAKS),
    )  # fmt: skip


def text_of_any(config: HfConfig, families: Mapping[str, Family], architecture: str, default: str) -> DecoderSpec:
    """Return `text_part` for the family in `families` that the text section's model_type names, by default `default`. Raises
    UnsupportedModel for another model_type."""
    kind = config.section("text_config").with_defaults(model_type=default).get("model_type")
    if kind not in families:
        raise UnsupportedModel(f"config: text_config is of model_type {kind!r}; supported: {', '.join(families)}")
    return text_part(config, families[kind], architecture, **dict(zip(_SIZES, _UNSAID.get(kind, ()), strict=False)))


def seeing(
    spec: DecoderSpec, config: HfConfig, *modalities: str, stored_below: tuple[str, ...] = (), **rest: Any
) -> DecoderSpec:
    """Return `spec` with a media encoder, computed by transformers' class of the same architecture. `stored_below`: further name
    prefixes of the encoder's tensors. `rest`: fields of `EncoderSpec`."""
    below = (*STORED_BELOW, *stored_below)
    encoder = EncoderSpec(spec.architecture, frozenset(modalities or ("image",)), below, config.values, **rest)
    return replace(spec, encoder=encoder, ignored_below=(*spec.ignored_below, *stored_below))
