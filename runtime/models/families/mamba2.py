"""Mamba 2 and Codestral Mamba: nothing but state space layers, no positions.

Residuals have the model's dtype, where the config may want float32 (`residual_in_fp32`): in float32 that is the same."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, decoder, num_layers
from runtime.models.read.hybrid import checked_mamba2, conv_kernel
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import SingleLayer
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba2
from runtime.weights.rules import rename

RULES = (
    rename("backbone.embeddings", into="model.embed_tokens"),
    rename("backbone.layers", into="model.layers"),
    rename("backbone.norm_f", into="model.norm"),
    rename("mixer", into="mamba"),
)
ANY_LENGTH = 1 << 18  # tokens: there is no limit of the model's own; Codestral Mamba was tested to this


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


ARCHITECTURES = {"Mamba2ForCausalLM": mamba2}
