"""Scales of an fp8 KV cache in a checkpoint: their names in several libraries, and how to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.models.spec.decoder import DecoderSpec
from runtime.weights.rules import Parameter, ReadPlan, Rule, Shape, TensorSource, stored_as

# Names of the scales of keys and of values, after the layer's name: compressed-tensors, vLLM, ModelOpt, AutoFP8 and older
# compressed-tensors. AutoFP8 has one scale for both.
_NAMES = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.kv_scale", "self_attn.kv_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
)

KV_SCALES = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".output_scale",
)  # suffixes of all these names, and of related tensors


def kv_scale_loads(spec: DecoderSpec, source: TensorSource) -> dict[str, tuple[ReadPlan, ReadPlan]]:
    """Return by layer name how to read the scales of keys and values. Layers without scales are absent."""
    stored = spec.own(source.shapes)
    if not any(name.endswith(KV_SCALES) for name in stored):
        return {}
    found = {}
    for layer, _ in spec.named_layers():
        for names in _NAMES:
            keys, values = (_load(f"{layer}.{name}", spec.rules, stored) for name in names)
            if keys is not None and values is not None:
                found[layer] = keys, values
                break
    return found


def _load(name: str, rules: Sequence[Rule], stored: Mapping[str, Shape]) -> ReadPlan | None:
    (theirs,) = (shard.name for shard in stored_as(Parameter(name, (1,)), rules).shards)
    if theirs not in stored:
        return None
    shape = stored[theirs] or (1,)  # a scalar is read as a row
    return stored_as(Parameter(name, shape, float32=True), rules)
