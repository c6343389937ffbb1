"""M-RoPE: rotary embeddings with positions in time, height and width. `mrope_section` is the number of dim pairs of each axis."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.read.hf_config import HfConfig, rope_parameters
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel

Sections = tuple[int, int, int]


def by_sections(config: HfConfig, default: Sections) -> tuple[int, ...]:
    """Return the axis of each pair of dims, 0 for time, 1 for height, 2 for width. Pairs of an axis are contiguous (Qwen2-VL)."""
    return tuple(axis for axis, num in enumerate(_sections(config, default)) for _ in range(num))


def interleaved(config: HfConfig, default: Sections, spec: DecoderSpec) -> tuple[int, ...]:
    """Return the axis of each pair of dims, 0 for time, 1 for height, 2 for width. The axes alternate until height and width
    have all their pairs; the other pairs belong to time (Qwen3-VL)."""
    sections, rope = _sections(config, default), spec.attention.rope
    pairs = 0 if rope is None else rope.dim // 2
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))


def with_axes(spec: DecoderSpec, axes: tuple[int, ...]) -> DecoderSpec:
    """Return `spec` with M-RoPE in all attention layers. `axes`: axis of each pair of dims. Raises UnsupportedModel if a head has
    another number of pairs."""
    for attention in spec.attentions():
        if attention.rope is None or attention.rope.dim != 2 * len(axes):
            raise UnsupportedModel(
                f"config: mrope_section is for {len(axes)} pairs of dims, not for those of its heads"
            )
    return spec.with_mixers(
        lambda _, attention: replace(attention, rope=attention.rope and replace(attention.rope, axes=axes))
    )


def without_mrope(config: HfConfig) -> HfConfig:
    """Return `config` with rope_type "default" instead of "mrope"."""
    parameters = rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind != "mrope":
        return config
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    return config.changed(**{key: parameters.changed(rope_type="default", type="default").values})


def _sections(config: HfConfig, default: Sections) -> list[int]:
    sections = rope_parameters(config).with_defaults(mrope_section=[*default]).get("mrope_section")
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(num) is int and num >= 0 for num in sections)
    ):
        raise UnsupportedModel(f"config: mrope_section is {sections!r}, not three counts")
    return sections
