"""Reading a Hugging Face config.json: each value checked where it is read, each complaint naming its key.

Knows the spellings that transformers 4 and 5 use for the same thing, and no family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runtime.models.spec import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    UnsupportedModel,
    YarnScaling,
)

_MOST = 1 << 31  # of any count: larger ones are typing errors, or attempts at something
_MOST_LAYERS = 4096


class HfConfig:
    """A config with typed access. A key that is absent or null takes its default; without one it is missed by name.

    Raises UnsupportedModel."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        """Whether the key is written, be it null."""
        return key in self._values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None, *, most: int = _MOST) -> int:
        value = self._value(key, default)
        if type(value) is not int or not 0 < value <= most:
            raise UnsupportedModel(f"config: {key} is {value!r}, not a count of 1 to {most}")
        return value

    def count_or_zero(self, key: str, default: int) -> int:
        return 0 if self._value(key, default) == 0 else self.count(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Finite and above zero, as every number of these configs is."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedModel(f"config: {key} is {value!r}, not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"config: {key} is {value!r}, neither true nor false")
        return value

    def section(self, key: str) -> HfConfig:
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise UnsupportedModel(f"config: {key} is {value!r}, not an object")
        return HfConfig(value)

    def with_defaults(self, **defaults: Any) -> HfConfig:
        present = {key: value for key, value in self._values.items() if value is not None}
        return HfConfig({**defaults, **present})

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise UnsupportedModel(f"config: {key} is missing")
        return default


def heads(config: HfConfig, default_kv_heads: int | None = None) -> tuple[int, int, int]:
    """Query heads, kv heads, head size."""
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"config: {num_heads} attention heads do not share {num_kv_heads} kv heads evenly")
    hidden_size = config.count("hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModel(f"config: hidden_size {hidden_size} is not a multiple of {num_heads} attention heads")
    return num_heads, num_kv_heads, config.count("head_dim", hidden_size // num_heads)


def num_layers(config: HfConfig) -> int:
    return config.count("num_hidden_layers", most=_MOST_LAYERS)


def require_silu(config: HfConfig) -> None:
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise UnsupportedModel(f"config: hidden_act {config.get('hidden_act')!r} is not supported, only silu")


def rope(config: HfConfig, head_size: int) -> Rope:
    """Of `rope_parameters` (transformers 5), or of `rope_theta` and `rope_scaling` (4)."""
    parameters = config.section("rope_parameters" if config.get("rope_parameters") else "rope_scaling").with_defaults(
        rope_theta=config.number("rope_theta", 10000.0),
        partial_rotary_factor=config.number("partial_rotary_factor", 1.0),
    )
    dim = int(head_size * parameters.number("partial_rotary_factor"))
    if dim % 2 or not 0 < dim <= head_size:
        raise UnsupportedModel(f"config: a rotary embedding of {dim} of {head_size} dims is not possible")
    return Rope(dim, parameters.number("rope_theta"), _scaling(config, parameters, dim))


def context_length(config: HfConfig, default: int) -> int:
    """How many positions the rotary embedding was made for."""
    positions = config.count("max_position_embeddings", default)
    parameters = config.section("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if _kind(parameters) == "yarn":
        # Qwen's configs keep the length before scaling in max_position_embeddings, others the one after it.
        original = parameters.count("original_max_position_embeddings", positions)
        return max(positions, int(original * parameters.number("factor", 1.0)))
    return positions


def _kind(parameters: HfConfig) -> Any:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _scaling(config: HfConfig, parameters: HfConfig, dim: int) -> RopeScaling | None:
    kind = _kind(parameters)
    if kind in ("default", "dynamic"):
        # Dynamic NTK scaling begins beyond max_position_embeddings, where it would turn keys anew that are already
        # cached. The context ends before that (`context_length`), so it never begins.
        return None
    if kind == "factors":
        return FactorScaling(_factors(parameters.get("factors"), dim))
    if kind == "linear":
        return LinearScaling(parameters.number("factor"))
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    positions = HfConfig({"original_max_position_embeddings": original}).count(
        "original_max_position_embeddings", config.count("max_position_embeddings")
    )
    if kind == "llama3":
        return Llama3Scaling(
            parameters.number("factor"),
            parameters.number("low_freq_factor"),
            parameters.number("high_freq_factor"),
            positions,
        )
    if kind == "yarn":
        return _yarn(config, parameters, positions)
    raise UnsupportedModel(
        f"config: rope_type {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn"
    )


def _yarn(config: HfConfig, parameters: HfConfig, positions: int) -> YarnScaling:
    factor = parameters.number("factor", config.count("max_position_embeddings") / positions)
    if parameters.get("attention_factor") is not None:
        attention_factor = parameters.number("attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention_factor = _mscale(factor, parameters.number("mscale")) / _mscale(
            factor, parameters.number("mscale_all_dim")
        )
    else:
        attention_factor = _mscale(factor, 1.0)
    return YarnScaling(
        factor,
        positions,
        attention_factor,
        parameters.number("beta_fast", 32.0),
        parameters.number("beta_slow", 1.0),
        parameters.flag("truncate", True),
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(values: Any, dim: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != dim // 2:
        raise UnsupportedModel(f"config: rope factors are not {dim // 2} numbers")
    return tuple(HfConfig({"rope factor": value}).number("rope factor") for value in values)


def sliding_window(config: HfConfig, layers: int) -> int | None:
    """The smallest attention window of any layer, in tokens, None if every layer sees everything."""
    if config.get("sliding_window") is None:
        return None
    types = config.get("layer_types")
    if isinstance(types, list):
        return config.count("sliding_window") if "sliding_attention" in types[:layers] else None
    return config.count("sliding_window")
