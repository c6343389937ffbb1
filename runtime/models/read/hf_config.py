"""Reader of a Hugging Face config.json. Each value is checked when it is read, and each error contains its key.

Supports the different keys of transformers 4 and 5. Contains nothing specific to a family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import AnyLayer
from runtime.models.spec.mlp import Activation
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import Norm
from runtime.models.spec.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

_MAX_COUNT = 1 << 31  # larger counts are treated as invalid
_MAX_LAYERS = 4096


class HfConfig:
    """Hugging Face config with typed access. If a key is absent or null, its default is returned; UnsupportedModel is raised if
    it has none."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None, *, max_value: int = _MAX_COUNT) -> int:
        value = self._value(key, default)
        if type(value) is not int or not 0 < value <= max_value:
            raise UnsupportedModel(f"config: {key} is {value!r}, not a count of 1 to {max_value}")
        return value

    def count_or_zero(self, key: str, default: int) -> int:
        return 0 if self._value(key, default) == 0 else self.count(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of `key`, a finite number above 0. Raises UnsupportedModel for other values."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedModel(f"config: {key} is {value!r}, not a positive number")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

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

    def with_unsaid(self, **defaults: Any) -> HfConfig:
        """Return the config with defaults for absent keys only; a key that is null stays null."""
        return HfConfig({**defaults, **self._values})

    def changed(self, **values: Any) -> HfConfig:
        return HfConfig({**self._values, **values})

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
    """Return the numbers of query heads and of KV heads, and the head size."""
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"config: {num_heads} attention heads are not a multiple of the {num_kv_heads} kv heads")
    hidden_size = config.count("hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModel(f"config: hidden_size {hidden_size} is not a multiple of {num_heads} attention heads")
    return num_heads, num_kv_heads, config.count("head_dim", hidden_size // num_heads)


def num_layers(config: HfConfig) -> int:
    return config.count("num_hidden_layers", max_value=_MAX_LAYERS)


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}


def activation(config: HfConfig, key: str = "hidden_act", default: str = "silu") -> Activation:
    name = config.with_defaults(**{key: default}).get(key)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(f"config: {key} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


# --- layers of different kinds -------------------------------------------------------------------------------------

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def layer_types(config: HfConfig, default: Callable[[int], str], local: str = SLIDING) -> list[str]:
    """Return the attention type of each layer, FULL or `local`: from the config's `layer_types`, or `default(index)` without
    that key."""
    count, listed = num_layers(config), config.get("layer_types")
    if listed is None:
        return [default(index) for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not set(listed) <= {FULL, local}:
        raise UnsupportedModel(f"config: layer_types is not {count} times {FULL!r} or {local!r}")
    return listed[:count]


def every(period: int) -> Callable[[int], str]:
    """Return a function from layer index to layer type: each `period`-th layer FULL, other layers SLIDING."""
    return lambda index: SLIDING if (index + 1) % period else FULL


def window(config: HfConfig, layer_type: str = SLIDING) -> int | None:
    """Return the sliding window of layers of this type, in tokens. None if they have none, or if it covers the longest context."""
    if layer_type == FULL or config.get("sliding_window") is None:
        return None
    size = config.count("sliding_window")
    return None if size >= context_length(config, size + 1) else size


def decoder(
    config: HfConfig, architecture: str, layers: Iterable[AnyLayer], norm: Norm, *, tied: bool = False, **rest: Any
) -> DecoderSpec:
    """Return a decoder spec whose common fields are read from `config`. `tied`: default of `tie_word_embeddings`. `rest`:
    further fields."""
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(layers),
        norm=norm,
        tied_embedding=config.flag("tie_word_embeddings", tied),
        max_model_len=context_length(config, 2048),
        **rest,
    )


# --- rotary embedding ----------------------------------------------------------------------------------------------


def rope(config: HfConfig, head_size: int, layer_type: str | None = None) -> Rope:
    """Return the rotary embedding: from `rope_parameters` (transformers 5), which may differ by layer type, or from `rope_theta`
    and `rope_scaling` (transformers 4)."""
    parameters = rope_parameters(config, layer_type).with_defaults(
        rope_theta=config.number("rope_theta", 10000.0),
        partial_rotary_factor=config.number("partial_rotary_factor", 1.0),
    )
    part = parameters.number("partial_rotary_factor")
    dim = head_size if _kind(parameters) == "proportional" else int(head_size * part)
    if dim % 2 or not 0 < dim <= head_size or part > 1:
        raise UnsupportedModel(
            f"config: a rotary embedding of {int(head_size * part)} of {head_size} dims is not possible"
        )
    return Rope(dim, parameters.number("rope_theta"), _scaling(config, parameters, dim))


def local_rope(config: HfConfig, head_size: int, theta: float) -> Rope:
    """Return the rotary embedding of layers with a window, without context scaling. `theta`: its base, unless the config has
    separate parameters for these layers."""
    by_type = SLIDING in config.section("rope_parameters")
    return rope(config, head_size, SLIDING) if by_type else Rope(head_size, theta)


def context_length(config: HfConfig, default: int) -> int:
    """Return the longest context of the rotary embedding, in tokens. `default`: value without `max_position_embeddings`."""
    positions = config.count("max_position_embeddings", default)
    parameters = rope_parameters(config, FULL)
    if _kind(parameters) == "yarn":
        # In Qwen's configs max_position_embeddings is the length before scaling, in others the length after it.
        original = parameters.count("original_max_position_embeddings", positions)
        return max(positions, int(original * parameters.number("factor", 1.0)))
    return positions


def rope_parameters(config: HfConfig, layer_type: str | None = None) -> HfConfig:
    parameters = config.section("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    return parameters if layer_type is None or layer_type not in parameters else parameters.section(layer_type)


def _kind(parameters: HfConfig) -> Any:
    if parameters.get("short_factor") is not None:  # older name of LongRoPE in Phi-3's configs: "su" or "yarn"
        return "longrope"
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _scaling(config: HfConfig, parameters: HfConfig, dim: int) -> RopeScaling | None:
    kind = _kind(parameters)
    match kind:
        case "default" | "dynamic":
            # Dynamic NTK scaling applies beyond max_position_embeddings, where cached keys would have to be rotated again. The
            # context ends before that (`context_length`), so it never applies.
            return None
        case "factors":
            return FactorScaling(_factors(parameters, "factors", dim))
        case "linear":
            return LinearScaling(parameters.number("factor"))
        case "llama3":
            return Llama3Scaling(
                parameters.number("factor"),
                parameters.number("low_freq_factor"),
                parameters.number("high_freq_factor"),
                _original_positions(config, parameters),
            )
        case "yarn":
            return _yarn(config, parameters, _original_positions(config, parameters))
        case "longrope":
            return _longrope(config, parameters, _original_positions(config, parameters), dim)
        case "proportional":
            rotary_pairs = int(parameters.number("partial_rotary_factor") * dim // 2)
            return ProportionalScaling(rotary_pairs, parameters.number("factor", 1.0))
    raise UnsupportedModel(
        f"config: rope_type {kind!r} is not supported; "
        "supported: default, linear, dynamic, llama3, yarn, longrope, proportional"
    )


def _original_positions(config: HfConfig, parameters: HfConfig) -> int:
    key = "original_max_position_embeddings"
    original = config.get(key) or parameters.get(key)
    return HfConfig({key: original}).count(key, config.count("max_position_embeddings"))


def _longrope(config: HfConfig, parameters: HfConfig, positions: int, dim: int) -> LongRopeScaling:
    factor = parameters.number("factor", config.count("max_position_embeddings") / positions)
    usual = math.sqrt(1 + math.log(factor) / math.log(positions)) if factor > 1 else 1.0
    return LongRopeScaling(
        _factors(parameters, "short_factor", dim),
        _factors(parameters, "long_factor", dim),
        positions,
        parameters.number("attention_factor", usual),
    )


def _yarn(config: HfConfig, parameters: HfConfig, positions: int) -> YarnScaling:
    factor = parameters.number("factor", config.count("max_position_embeddings") / positions)
    if parameters.get("attention_factor") is not None:
        attention_factor = parameters.number("attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention_factor = mscale(factor, parameters.number("mscale")) / mscale(
            factor, parameters.number("mscale_all_dim")
        )
    else:
        attention_factor = mscale(factor, 1.0)
    return YarnScaling(
        factor,
        positions,
        attention_factor,
        parameters.number("beta_fast", 32.0),
        parameters.number("beta_slow", 1.0),
        parameters.flag("truncate", True),
    )


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's attention scaling factor (Peng et al. 2023) for the context scaling `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(parameters: HfConfig, key: str, dim: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        raise UnsupportedModel(f"config: rope {key} are not {dim // 2} numbers")
    return tuple(HfConfig({f"rope {key}": value}).number(f"rope {key}") for value in values)
