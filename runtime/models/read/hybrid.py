"""Common parts of families with recurrent layers: config fields, and checks of unsupported options."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runtime.models.read.hf_config import FULL, HfConfig, activation, num_layers
from runtime.models.spec.mlp import Activation
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba2

RECURRENT = "linear_attention"
_EARLIER_NAMES = {"mamba": RECURRENT, "attention": FULL}  # names in transformers 4
_NO_LIMIT = [0.0, math.inf], [0.0, {"__float__": "Infinity"}]  # how transformers 4 and 5 write infinity in JSON


def block_types(config: HfConfig, key: str, default: Sequence[str], known: frozenset[str]) -> list[str]:
    """Return the kind of each layer: the list `key` of the config, or `default`. Raises UnsupportedModel for a kind not in
    `known`."""
    listed = config.get(key)
    if listed is None:
        return list(default)
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise UnsupportedModel(f"config: {key} is {listed!r}, not a list of names")
    types = [_EARLIER_NAMES.get(str(each), str(each)) for each in listed]
    unknown = sorted(set(types) - known)
    if unknown:
        raise UnsupportedModel(f"config: {key} has {', '.join(unknown)}; supported: {', '.join(sorted(known))}")
    return types


def hybrid_types(config: HfConfig, default: Sequence[str]) -> list[str]:
    """Return RECURRENT or FULL for each layer."""
    types = block_types(config, "layer_types", default, frozenset({RECURRENT, FULL}))
    if len(types) != num_layers(config):
        raise UnsupportedModel(f"config: layer_types has {len(types)} entries for {num_layers(config)} layers")
    return types


def indices(config: HfConfig, key: str) -> list[int]:
    """Return a list of layer indices from the config; empty if the key is absent."""
    listed = config.get(key) or []
    if not isinstance(listed, list) or not all(type(index) is int for index in listed):
        raise UnsupportedModel(f"config: {key} is {listed!r}, not a list of layers")
    return listed


def conv_kernel(config: HfConfig, key: str, default: int = 4) -> int:
    count = config.count(key, default)
    if count < 2:
        raise UnsupportedModel(f"config: {key} is {count}: a convolution needs at least two tokens")
    return count


def checked_mamba2(config: HfConfig, mixer: Mamba2, act: str = "hidden_act") -> Mamba2:
    """Return `mixer` unchanged. Raises UnsupportedModel if its sizes are inconsistent or the config has unsupported options."""
    if mixer.num_heads % mixer.num_groups:
        raise UnsupportedModel(f"config: {mixer.num_heads} heads are not a multiple of its {mixer.num_groups} groups")
    check_silu(config, act)
    limit = config.get("time_step_limit")
    if limit not in (None, *_NO_LIMIT):
        raise UnsupportedModel(f"config: time_step_limit {limit!r} is not supported, only 0 to infinity")
    return mixer


def check_silu(config: HfConfig, key: str = "hidden_act") -> None:
    if activation(config, key) is not Activation.SILU:
        raise UnsupportedModel(f"config: {key} {config.get(key)!r} is not supported in recurrent layers, only silu")


def bamba_mixer(config: HfConfig) -> Mamba2:
    """Return the Mamba-2 mixer of a config with Bamba's keys."""
    inner = config.count("mamba_d_ssm", config.count("mamba_expand", 2) * config.count("hidden_size"))
    num_heads = config.count("mamba_n_heads", 128)
    head_size = (
        inner // num_heads if config.get("mamba_d_head") == "auto" else config.count("mamba_d_head", inner // num_heads)
    )
    if num_heads * head_size != inner:
        raise UnsupportedModel(f"config: {num_heads} heads of {head_size} dims are not {inner}, the size of the mixer")
    mixer = Mamba2(
        num_heads,
        head_size,
        config.count("mamba_n_groups", 1),
        config.count("mamba_d_state", 256),
        conv_kernel(config, "mamba_d_conv"),
        RMSNorm(config.number("rms_norm_eps", 1e-6)),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        output_bias=config.flag("mamba_proj_bias", False),
    )
    return checked_mamba2(config, mixer)
