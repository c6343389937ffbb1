"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer consists of a norm and one block.

The block is a Mamba-2 mixer, attention without positions, an MLP of two matrices with a squared ReLU, or a mixture of experts with
such MLPs. In some models the experts have a smaller hidden size.

transformers 5 clamps dt of Mamba layers to `time_step_min`, but only in prompts. The config's `time_step_limit` requires no
clamp. This implementation does not clamp, so prompt and output tokens are computed alike."""

from __future__ import annotations

from collections.abc import Callable

from runtime.models.read.hf_config import FULL, HfConfig, activation, decoder, heads
from runtime.models.read.hybrid import RECURRENT, block_types, checked_mamba2, conv_kernel
from runtime.models.read.mixture import SHARED_EXPERTS, checked_moe, num_experts, sigmoid_router
from runtime.models.read.mtp import mtp
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec, JoinedEntry
from runtime.models.spec.layer import OnlyBlock, SingleLayer
from runtime.models.spec.mlp import Latent, MoE, PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba2
from runtime.weights.rules import rename, stack

_LETTERS = {"M": RECURRENT, "*": FULL, "-": "mlp", "E": "moe"}
_RULES = (
    LLAMA_RULES[0],
    SHARED_EXPERTS,
    rename("fc1_latent_proj", into="latent_in"),
    rename("fc2_latent_proj", into="latent_out"),
    rename("mixer", into="mamba"),
    rename("mixer", into="self_attn"),
    rename("mixer", into="mlp"),
    rename("model.embeddings", into="model.embed_tokens"),
    rename("model.norm_f", into="model.norm"),
)
_SEPARATE = (*_RULES, rename("up_proj", into="up"), rename("down_proj", into="down"))
_STACKED = (*_RULES, stack("experts"), rename("up_proj", into="up.weight"), rename("down_proj", into="down.weight"))
_AS_NVIDIA_WRITES = (*_SEPARATE, rename("backbone", into="model"))


def nemotron_h(config: HfConfig) -> DecoderSpec:
    config = _with_defaults(config)
    return decoder(
        config, "NemotronHForCausalLM", _layers(config, _types(config)), _norm(config), rules=_SEPARATE,
        other_rules=(_AS_NVIDIA_WRITES, _STACKED), ignored_below=("mtp.",),
    )  # fmt: skip


def nemotron_h_mtp(config: HfConfig, spec: DecoderSpec) -> DraftHeadSpec:
    """Return the spec of the MTP module. Its layers have a pattern of their own in the config. The first layer's tensors include
    the entry, the last layer's the final norm."""
    config, key = _with_defaults(config), "mtp_hybrid_override_pattern"
    types = _types(
        config.changed(layers_block_type=config.get("mtp_layers_block_type"), hybrid_override_pattern=config.get(key))
    )
    if not types or RECURRENT in types:
        raise UnsupportedModel(f"config: {key} is {config.get(key)!r}; supported: attention, MLPs and experts")
    rules = (
        rename("mtp.layers.0.enorm", into="model.entry.embedding_norm"),
        rename("mtp.layers.0.hnorm", into="model.entry.hidden_norm"),
        rename("mtp.layers.0.eh_proj", into="model.entry.projection"),
        rename(f"mtp.layers.{len(types) - 1}.final_layernorm", into="model.norm"),
        rename("mtp", into="model"),
    )
    return mtp(
        config, spec, "num_nextn_predict_layers", JoinedEntry(spec.norm), rules, ("mtp.",), layers=_layers(config, types),
        hands_on_normed=True,
    )  # fmt: skip


def _with_defaults(config: HfConfig) -> HfConfig:
    return config.with_defaults(num_key_value_heads=8, head_dim=128, max_position_embeddings=4096)


def _norm(config: HfConfig) -> RMSNorm:
    return RMSNorm(config.number("layer_norm_epsilon", 1e-5))


def _layers(config: HfConfig, types: list[str]) -> tuple[SingleLayer, ...]:
    norm = _norm(config)
    kinds: dict[str, Callable[[], OnlyBlock]] = {
        RECURRENT: lambda: _mixer(config, norm),
        FULL: lambda: _attention(config),
        "mlp": lambda: _mlp(config, config.count("intermediate_size", 21504), "mlp"),
        "moe": lambda: _moe(config),
    }
    blocks = {kind: kinds[kind]() for kind in set(types)}
    return tuple(SingleLayer(blocks[kind], norm) for kind in types)


def _types(config: HfConfig) -> list[str]:
    pattern = config.get("hybrid_override_pattern")
    if config.get("layers_block_type") is None and isinstance(pattern, str):
        unknown = sorted(set(pattern) - set(_LETTERS))
        if unknown:
            raise UnsupportedModel(f"config: hybrid_override_pattern has {', '.join(unknown)}")
        config = config.with_defaults(layers_block_type=[_LETTERS[letter] for letter in pattern])
    return block_types(config, "layers_block_type", (), frozenset(_LETTERS.values()))


def _attention(config: HfConfig) -> Attention:
    bias = config.flag("attention_bias", False)
    return Attention(*heads(config), rope=None, qkv_bias=bias, output_bias=bias)


def _mlp(config: HfConfig, size: int, name: str) -> PlainMLP:
    return PlainMLP(size, config.flag("mlp_bias", False), activation(config, "mlp_hidden_act", "relu2"), name)


def _moe(config: HfConfig) -> MoE:
    router = sigmoid_router(config.with_defaults(num_experts_per_tok=2))
    shared = _mlp(config, config.count("moe_shared_expert_intermediate_size", 7688), "mlp.shared_expert")
    latent = None
    if config.get("moe_latent_size") is not None:
        latent = Latent(config.count("moe_latent_size"), shared.bias)
    moe = MoE(
        num_experts(config, 8), config.count("moe_intermediate_size", 7688), router, shared,
        activation=shared.activation, gated=False, latent=latent,
    )  # fmt: skip
    return checked_moe(moe)


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
        conv_kernel(config, "conv_kernel"),
        norm,
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        output_bias=config.flag("use_bias", False),
    )
    return checked_mamba2(config, mixer, "mamba_hidden_act")


MTP = {"NemotronHForCausalLM": nemotron_h_mtp}
ARCHITECTURES = {"NemotronHForCausalLM": nemotron_h}
