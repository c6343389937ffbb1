"""Falcon-H1: attention and a Mamba-2 mixer in parallel in each layer, then an MLP. Most matrices have a multiplier (muP)."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.bamba import NORMS, RULES
from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.hybrid import bamba_mixer
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Branch, Layer, Mixer, ParallelMixers
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.recurrent import Mamba2


def falcon_h1(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5)
    spec, mixer = llama(config, "FalconH1ForCausalLM"), _mixer(config)
    scale = spec.attention.scale * config.number("key_multiplier", 1.0)  # scales keys, and therefore scores
    mixers = ParallelMixers(
        (_branch(config, "ssm", mixer), _branch(config, "attention", replace(spec.attention, score_scale=scale)))
    )
    of_gate, of_down = _multipliers(config, "mlp_multipliers", 2)

    def change(_: int, layer: Layer) -> Layer:
        assert isinstance(layer.mlp, GatedMLP)
        mlp = replace(layer.mlp, gate_multiplier=of_gate, down_multiplier=of_down)
        return replace(layer, mixer=mixers, mlp=mlp, before=NORMS)

    return replace(
        spec.with_layers(change),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
        rules=RULES,
    )


def _branch(config: HfConfig, name: str, mixer: Mixer) -> Branch:
    return Branch(mixer, *(config.number(f"{name}_{end}_multiplier", 1.0) for end in ("in", "out")))


def _mixer(config: HfConfig) -> Mamba2:
    mixer = bamba_mixer(config.with_unsaid(mamba_d_ssm=1024))
    gate, x, b, c, dt = _multipliers(config, "ssm_multipliers", 5)
    return replace(
        mixer,
        norm=mixer.norm if config.flag("mamba_rms_norm", False) else None,
        gate_first=not config.flag("mamba_norm_before_gate", True),
        output_bias=config.flag("projectors_bias", False),
        multipliers=(gate, x, b, c, dt),
    )


def _multipliers(config: HfConfig, key: str, count: int) -> list[float]:
    listed = config.get(key) or [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise UnsupportedModel(f"config: {key} is {listed!r}, not {count} numbers")
    return [HfConfig({key: each}).number(key) for each in listed]


ARCHITECTURES = {"FalconH1ForCausalLM": falcon_h1}
