"""Models of any causal family without a language model head: base models, and models with a classification or reward head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from runtime.models.read.encoder import dense, with_classes
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.attention import Mask
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import NameMapping

_GENERATING = ("ForCausalLM", "LMHeadModel")
# Last alternative rules, for checkpoints that were saved from a model without its head.
_BARE = tuple(NameMapping((below,), ((),)) for below in ("model", "transformer"))


def with_bare_names(spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` for checkpoints whose tensor names may lack the prefix "model." or "transformer."."""
    ways = (spec.rules, *spec.other_rules)
    return replace(spec, other_rules=(*ways[1:], *((*way, bare) for way in ways for bare in _BARE)))


def causal_with_other_head(
    name: str, families: Mapping[str, Callable[[HfConfig], DecoderSpec]]
) -> Callable[[HfConfig], DecoderSpec] | None:
    """Return the function that reads a config of architecture `name`, derived from the family's LM architecture. None if `name`
    is neither a base model nor a model with another head."""
    for ending, make in _HEADS.items():
        stem = name.removesuffix(ending)
        known = (families[f"{stem}{other}"] for other in _GENERATING if f"{stem}{other}" in families)
        if stem != name and (family := next(known, None)) is not None:
            return lambda config: make(_without_head(family(config), name), config)
    return None


def both_ways(spec: DecoderSpec, config: HfConfig) -> DecoderSpec:
    """Return `spec` with bidirectional attention if the config requires it, as some embedding models do."""
    if config.get("is_causal") is not False and config.get("use_bidirectional_attention") is not True:
        return spec
    if any(attention.window is not None for attention in spec.attentions()):
        raise UnsupportedModel("config: bidirectional attention with sliding windows is not supported")

    everywhere = spec.with_mixers(lambda _, attention: replace(attention, mask=Mask.FULL))
    return replace(everywhere, generates=False, tied_embedding=False)


def _without_head(spec: DecoderSpec, name: str) -> DecoderSpec:
    return with_bare_names(replace(spec, architecture=name, generates=False, tied_embedding=False))


def _bare(spec: DecoderSpec, config: HfConfig) -> DecoderSpec:
    return spec


def _classes(spec: DecoderSpec, config: HfConfig) -> DecoderSpec:
    return with_classes(spec, config, (), "score", pooling="last", bias=False)


def _token_classes(spec: DecoderSpec, config: HfConfig) -> DecoderSpec:
    return with_classes(spec, config, (), "score", by_token=True, pooling="last")


def _reward(spec: DecoderSpec, config: HfConfig) -> DecoderSpec:
    one = config.with_defaults(num_labels=1)
    spec = with_classes(spec, one, (dense(config, "score.0", "relu"),), "score.2", pooling="last")
    return replace(spec, pooler=replace(spec.pooler, activation="none"))


_HEADS: dict[str, Callable[[DecoderSpec, HfConfig], DecoderSpec]] = {
    "ForSequenceClassification": _classes,
    "ForTokenClassification": _token_classes,
    "ForRewardModel": _reward,
    "Model": _bare,
}
