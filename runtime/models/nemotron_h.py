"""Nemotron-H and Nemotron Nano 2: each layer one block behind a norm, be it Mamba-2's mixer, attention that knows no positions
or an MLP of two matrices with a squared ReLU.

transformers 5 keeps the steps of the Mamba layers from falling below `time_step_min`, but only in prompts. The config's own
`time_step_limit` asks for no such thing, and a token is the same to us in a prompt and behind it. Layers of experts are not
supported: theirs are MLPs of two matrices too."""

from __future__ import annotations

from runtime.models.hf_config import FULL, HfConfig, activation, decoder, heads
from runtime.models.hybrid import RECURRENT, block_types, mamba2, taps
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Block, SingleLayer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba2
from runtime.weights.rules import rename

_LETTERS = {"M": RECURRENT, "*": FULL, "-": "mlp", "E": "moe"}
_RULES = (
    LLAMA_RULES[0],
    rename("mixer", into="mamba"),
    rename("mixer", into="self_attn"),
    rename("mixer", into="mlp"),
    rename("model.embeddings", into="model.embed_tokens"),
    rename("model.norm_f", into="model.norm"),
)
_AS_NVIDIA_WRITES = (*_RULES, rename("backbone", into="model"))


def nemotron_h(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=8, head_dim=128, max_position_embeddings=4096)
    norm = RMSNorm(config.number("layer_norm_epsilon", 1e-5))
    types = _types(config)
    blocks: dict[str, Block] = {RECURRENT: _mixer(config, norm)}
    bias = config.flag("attention_bias", False)
    blocks[FULL] = Attention(*heads(config), rope=None, qkv_bias=bias, output_bias=bias)
    blocks["mlp"] = PlainMLP(
        config.count("intermediate_size"),
        config.flag("mlp_bias", False),
        activation(config, "mlp_hidden_act", "relu2"),
    )
    layers = [SingleLayer(blocks[each], norm) for each in types]
    return decoder(
        config, "NemotronHForCausalLM", layers, norm, rules=_RULES, other_rules=(_AS_NVIDIA_WRITES,),
        ignored_below=("mtp.",),
    )  # fmt: skip


def _types(config: HfConfig) -> list[str]:
    pattern = config.get("hybrid_override_pattern")
    if config.get("layers_block_type") is None and isinstance(pattern, str):
        unknown = sorted(set(pattern) - set(_LETTERS))
        if unknown:
            raise UnsupportedModel(f"config: hybrid_override_pattern has {', '.join(unknown)}")
        config = config.with_defaults(layers_block_type=[_LETTERS[letter] for letter in pattern])
    return block_types(config, "layers_block_type", (), frozenset({RECURRENT, FULL, "mlp"}))


def _mixer(config: HfConfig, norm: RMSNorm) -> Mamba2:
    config = config.with_defaults(
        n_groups=config.get("mamba_n_groups") or 8, conv_kernel=config.get("mamba_d_conv") or 4,
        use_conv_bias=config.with_defaults(mamba_conv_bias=True).get("mamba_conv_bias"),
    )  # fmt: skip
    mixer = Mamba2(
        config.count("mamba_num_heads", 128),
        config.count("mamba_head_dim", 64),
        config.count("n_groups"),
        config.count("ssm_state_size", 128),
        taps(config, "conv_kernel"),
        norm,
        config.flag("use_bias", False),
        config.flag("use_conv_bias", True),
    )
    return mamba2(config, mixer, "mamba_hidden_act")
