"""Mamba and Falcon Mamba: nothing but state space layers of channels, no positions. Residuals have the model's dtype, as in
`mamba2`."""

from __future__ import annotations

from runtime.models.families.mamba2 import ANY_LENGTH, RULES
from runtime.models.read.hf_config import HfConfig, decoder, num_layers
from runtime.models.read.hybrid import check_silu, conv_kernel
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import SingleLayer
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba


def mamba(config: HfConfig) -> DecoderSpec:
    return _mamba(config, "MambaForCausalLM", None)


def falcon_mamba(config: HfConfig) -> DecoderSpec:
    return _mamba(config, "FalconMambaForCausalLM", RMSNorm(config.number("mixer_rms_eps", 1e-6)))


def _mamba(config: HfConfig, architecture: str, dt_b_c_norm: RMSNorm | None) -> DecoderSpec:
    check_silu(config)
    config = config.with_defaults(max_position_embeddings=ANY_LENGTH)
    norm, hidden_size = RMSNorm(config.number("layer_norm_epsilon", 1e-5)), config.count("hidden_size")
    by_width = -(-hidden_size // 16)
    mixer = Mamba(
        inner_size=config.count("intermediate_size", config.count("expand", 2) * hidden_size),
        state_size=config.count("state_size", 16),
        rank=by_width if config.get("time_step_rank") == "auto" else config.count("time_step_rank", by_width),
        conv_kernel=conv_kernel(config, "conv_kernel"),
        norm=dt_b_c_norm,
        norm_weights=False,
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
    )
    layers = [SingleLayer(mixer, norm)] * num_layers(config)
    return decoder(config, architecture, layers, norm, tied=True, rules=RULES)


ARCHITECTURES = {"MambaForCausalLM": mamba, "FalconMambaForCausalLM": falcon_mamba}
