"""MTP modules: extra layers of a checkpoint that predict further tokens (DeepSeek-V3, 2024).

A family with MTP modules has a dict MTP that maps an architecture to the function that describes its first module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec, JoinedEntry
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import Rule, rename

MTP = Callable[[HfConfig, DecoderSpec], DraftHeadSpec]


def mtp(
    config: HfConfig, spec: DecoderSpec, key: str, entry: JoinedEntry, rules: tuple[Rule, ...], below: tuple[str, ...],
    **more: Any,
) -> DraftHeadSpec:  # fmt: skip
    """Return the spec of a model's first MTP module: a copy of the model's last layer, with the fields in `more` replaced.

    `key`: config key with the number of modules. `rules`: checkpoint rules in addition to the model's. `below`: prefixes of the
    module's tensor names. Raises UnsupportedModel if the config has no MTP module."""
    if not config.count_or_zero(key, 0):
        raise UnsupportedModel(
            f"{spec.architecture}: the config has no MTP layers ({key}), so method mtp is not available"
        )
    given: dict[str, Any] = {
        "architecture": f"the MTP layer of {spec.architecture}",
        "layers": spec.layers[-1:],
        "norm": spec.norm,
        "rules": (*rules, *spec.rules),
        "other_rules": tuple((*rules, *other) for other in spec.other_rules),
        "below": below,
    }
    return DraftHeadSpec.of(spec, entry=entry, **given | more)


def beyond_the_last(config: HfConfig, spec: DecoderSpec) -> DraftHeadSpec:
    """Return the spec of an MTP module like that of DeepSeek-V3, stored as the layer after the model's last one. Its copies of
    the model's embedding and head are not read."""
    name = f"model.layers.{len(spec.layers)}"
    rules = (
        rename(f"{name}.enorm", into="model.entry.embedding_norm"),
        rename(f"{name}.hnorm", into="model.entry.hidden_norm"),
        rename(f"{name}.eh_proj", into="model.entry.projection"),
        rename(f"{name}.shared_head.norm", into="model.norm"),
        rename(name, into="model.layers.0"),
    )
    found = mtp(config, spec, "num_nextn_predict_layers", JoinedEntry(spec.norm), rules, (f"{name}.",))
    return replace(found, ignored=(*found.ignored, f"{name}.embed_tokens.weight", f"{name}.shared_head.head.weight"))
