"""Mamba, Falcon Mamba, Mamba 2 and Codestral Mamba: state space layers only, without positions.

Residuals have the model's dtype. The config option `residual_in_fp32` is ignored; for models in float32 it has no effect."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, decoder, num_layers
from runtime.models.read.hybrid import check_silu, checked_mamba2, conv_kernel
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import SingleLayer
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba, Mamba2
from runtime.weights.rules import rename

RULES = (
    rename("backbone.embeddings", into="model.embed_tokens"),
    rename("backbone.layers", into="model.layers"),
    rename("backbone.norm_f", into="model.norm"),
    rename("mixer", into="mamba"),
)
ANY_LENGTH = 1 << 18  # tokens: the models have no limit; Codestral Mamba was tested to this length


def mamba2(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=ANY_LENGTH)
    norm = RMSNorm(config.number("layer_norm_epsilon", 1e-5))
    mixer = Mamba2(
        config.count("num_heads", 128),
        config.count("head_dim", 64),
        config.count("n_groups", 8),
        config.count("state_size", 128),
        conv_kernel(config, "conv_kernel"),
        norm,
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        output_bias=config.flag("use_bias", False),
    )
    if mixer.inner_size != config.count("expand", 2) * config.count("hidden_size"):
        raise UnsupportedModel(f"config: num_heads times head_dim is {mixer.inner_size}, not expand times hidden_size")
    layers = [SingleLayer(checked_mamba2(config, mixer), norm)] * num_layers(config)
    return decoder(config, "Mamba2ForCausalLM", layers, norm, rules=RULES)


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


ARCHITECTURES = {
    "Mamba2ForCausalLM": mamba2,
    "MambaForCausalLM": mamba,
    "FalconMambaForCausalLM": falcon_mamba,
}
