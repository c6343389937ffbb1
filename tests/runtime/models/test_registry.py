"""From a config to a spec: what is read, what is refused, and in which words."""

from __future__ import annotations

import pytest

from runtime.kv.kinds import Full, State
from runtime.models.registry import spec_from_config
from runtime.models.spec.attention import QKNorm
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.rope import LinearScaling, Rope
from runtime.weights.rules import WeightsError
from tests.kinds import state

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 8}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
QWEN2_MOE = QWEN2 | {"architectures": ["Qwen2MoeForCausalLM"], "sliding_window": 128, "num_key_value_heads": 2}
QWEN3_MOE = QWEN2_MOE | {"architectures": ["Qwen3MoeForCausalLM"]}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 128, "head_dim": 16}
GEMMA3 = GEMMA2 | {"architectures": ["Gemma3ForCausalLM"]}


def test_a_plain_llama():
    spec = spec_from_config(LLAMA)
    attention = spec.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (4, 4, 16)
    extras = (attention.qkv_bias, attention.output_bias, attention.qk_norm, spec.layers[0].mlp.bias)
    assert extras == (False, False, None, False)
    assert (len(spec.layers), spec.vocab_size, spec.hidden_size, spec.norm) == (2, 100, 64, RMSNorm(1e-5))
    assert (spec.max_model_len, spec.tied_embedding, spec.architecture) == (512, False, "LlamaForCausalLM")


def test_heads_may_have_a_size_of_their_own():
    spec = spec_from_config(LLAMA | {"head_dim": 40, "num_key_value_heads": 2})
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == ((4 + 2 + 2) * 40, 64)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 160)


def test_families_differ_where_they_should():
    qwen2, qwen3 = (spec_from_config(config).attention for config in (QWEN2, QWEN3))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.head_size) == (True, False, None, 16)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_size) == (
        False,
        False,
        QKNorm(RMSNorm(1e-5)),
        128,
    )
    assert spec_from_config(MISTRAL).attention.num_kv_heads == 8


def test_a_tied_embedding_is_one_parameter():
    tied, untied = (spec_from_config(LLAMA | {"tie_word_embeddings": tie}) for tie in (True, False))
    assert {p.name for p in untied.parameters()} - {p.name for p in tied.parameters()} == {"lm_head.weight"}
    assert [p.name for p in tied.parameters()].count("model.embed_tokens.weight") == 1


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (MISTRAL | {"sliding_window": 128}, 512),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 2048),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
    ],
)
def test_the_context_ends_where_the_model_would_no_longer_be_exact(config, length):
    assert spec_from_config(config).max_model_len == length


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": None}, [None, None]),
        (MISTRAL | {"sliding_window": 128}, [128, 128]),
        (MISTRAL | {"sliding_window": 4096}, [None, None]),  # as wide as the context: hides nothing
        (MISTRAL | {"max_position_embeddings": 32768}, [4096, 4096]),  # transformers' default where none is written
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": False}, [None, None]),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, [None, None]),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, [None, 128]),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, [128, 128]),
        (QWEN3 | {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, [None, 128]),
        (QWEN2_MOE | {"use_sliding_window": False}, [None, None]),
        (QWEN2_MOE | {"use_sliding_window": True}, [128, None]),
        (QWEN2_MOE | {"use_sliding_window": True, "max_window_layers": 0}, [None, None]),
        (QWEN3_MOE | {"use_sliding_window": False}, [None, None]),
        (QWEN3_MOE | {"use_sliding_window": True, "max_window_layers": 1}, [128, 128]),
        (GEMMA2, [128, None]),
        (GEMMA2 | {"layer_types": ["full_attention", "sliding_attention"]}, [None, 128]),
        (GEMMA3 | {"sliding_window_pattern": 2}, [128, None]),
        (GEMMA3, [128, 128]),
    ],
)
def test_windows_are_read_in_every_spelling(config, windows):
    assert [layer.mixer.window for layer in spec_from_config(config).layers] == windows


def test_gemma_3_of_either_transformers_has_two_rotary_embeddings():
    old = GEMMA3 | {
        "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    new = GEMMA3 | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    }
    ropes = [layer.mixer.rope for layer in spec_from_config(old).layers]
    assert ropes == [Rope(16, 5e3), Rope(16, 1e6, LinearScaling(8.0))]
    assert spec_from_config(new) == spec_from_config(old)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["Qwen2EyeForCausalLM"]},
            "Qwen2EyeForCausalLM is not supported natively.*nearest.*Qwen2ForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalLMs"]}, "nearest.*LlamaForCausalLM"),
        ({"architectures": []}, "names no model class"),
        ({"architectures": None}, "names no model class"),
        ({"architectures": [3]}, "names no model class"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu"),
        ({"layer_types": ["full_attention"], "architectures": ["Qwen2ForCausalLM"]}, "layer_types is not 2 times"),
        ({"layer_types": ["full_attention", "x"], "architectures": ["Qwen2ForCausalLM"]}, "layer_types is not 2 times"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}, "no_rope_layers is not 2 times 0 or 1"),
        (
            {"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post",
        ),
        (
            {"architectures": ["MptForCausalLM"], "attn_config": {"alibi": False}},
            "attn_config.alibi False is not supported, only True",
        ),
        ({"architectures": ["MptForCausalLM"], "attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm True"),
        ({"architectures": ["MptForCausalLM"], "logit_scale": "inv_sqrt_d_model"}, "logit_scale 'inv_sqrt_d_model'"),
        (
            {"architectures": ["GPTJForCausalLM"], "n_embd": 64, "n_head": 4, "rotary_dim": 32},
            "rotary_dim 32 is more than a head's 16",
        ),
        ({"architectures": ["GPTJForCausalLM"], "rotary_dim": None}, "rotary_dim is missing"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_act": {}}, "hidden_act {} is not supported"),
        ({"hidden_act": ["silu"]}, "is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a count"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of 4"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of the 3 kv heads"),
        ({"head_dim": 15}, "rotary embedding of 15 of 15 dims"),
        ({"partial_rotary_factor": 2.0}, "rotary embedding of 32 of 16 dims"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "xpos", "factor": 2.0}}, "rope_type 'xpos' is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope short_factor are not 8 numbers"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0] * 8}},
            "rope long_factor is 0",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "rope factors are not 8 numbers"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised with 'aqlm'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, says):
    with pytest.raises(UnsupportedModel, match=says):
        spec_from_config(LLAMA | changes)
    assert issubclass(UnsupportedModel, WeightsError)


MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8,
    "head_dim": 16, "n_groups": 2, "state_size": 32,
}  # fmt: skip
NEMOTRON_H = LLAMA | {
    "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*", "num_key_value_heads": 2, "mamba_num_heads": 8,
    "mamba_head_dim": 16,
}  # fmt: skip
JAMBA = LLAMA | {"architectures": ["JambaForCausalLM"], "num_key_value_heads": 2}
FALCON_H1 = JAMBA | {"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 128, "mamba_n_heads": 8}
ZAMBA2 = LLAMA | {"architectures": ["Zamba2ForCausalLM"], "layers_block_type": ["mamba", "hybrid", "hybrid"]}


def test_what_recurrent_layers_remember_does_not_grow():
    spec = spec_from_config(MAMBA2)
    assert spec.memory_kinds() == (state((3, 128 + 2 * 2 * 32), (8, 16, 32)),) * 2
    kinds = [type(kind) for kind in spec_from_config(NEMOTRON_H).memory_kinds()]
    assert kinds == [State, State, Full]


def test_a_layer_may_remember_in_two_ways():
    kinds = [type(kind) for kind in spec_from_config(FALCON_H1).memory_kinds()]
    assert kinds == [State, Full] * len(spec_from_config(FALCON_H1).layers)
    kinds = [type(kind) for kind in spec_from_config(ZAMBA2).memory_kinds()]
    assert kinds == [State, Full, State, Full, State]


def test_what_layers_share_is_read_once():
    names = [parameter.name for parameter in spec_from_config(ZAMBA2).parameters()]
    assert len(names) == len(set(names))
    shared = {name for name in names if "shared_transformer.self_attn" in name}
    assert shared == {
        "model.layers.1.shared_transformer.self_attn.qkv_proj.weight",
        "model.layers.1.shared_transformer.self_attn.o_proj.weight",
    }


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MAMBA2 | {"time_step_limit": [0.001, 0.1]}, "time_step_limit .* only 0 to infinity"),
        (MAMBA2 | {"hidden_act": "gelu"}, "'gelu' is not supported in recurrent layers"),
        (MAMBA2 | {"n_groups": 3}, "8 heads are not a multiple of its 3 groups"),
        (MAMBA2 | {"conv_kernel": 1}, "conv_kernel is 1"),
        (MAMBA2 | {"head_dim": 8}, "not expand times hidden_size"),
        (NEMOTRON_H | {"layers_block_type": ["mamba", "attn"]}, "layers_block_type has attn; supported"),
        (NEMOTRON_H | {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has X"),
        (JAMBA | {"mamba_d_conv": 1}, "mamba_d_conv is 1"),
        (FALCON_H1 | {"mamba_n_heads": 5}, "5 heads of 25 dims are not 128"),
        (FALCON_H1 | {"ssm_multipliers": [1.0]}, r"ssm_multipliers is \[1.0\], not 5 numbers"),
        (FALCON_H1 | {"mlp_multipliers": [1.0, 0]}, "mlp_multipliers is 0, not a positive number"),
        (ZAMBA2 | {"layers_block_type": None}, "layers_block_type is missing"),
        (ZAMBA2 | {"num_key_value_heads": 1}, "num_key_value_heads other than num_attention_heads"),
        (ZAMBA2 | {"n_mamba_heads": 7}, "is no multiple of 7 heads"),
        (JAMBA | {"num_experts": 2, "num_experts_per_tok": 3}, "3 experts per token of 2"),
    ],
)
def test_recurrent_layers_that_make_no_sense_or_are_not_known_are_refused(config, says):
    with pytest.raises(UnsupportedModel, match=says):
        spec_from_config(config)


def test_infinity_may_be_written_as_transformers_4_or_5_does():
    for infinity in (float("inf"), {"__float__": "Infinity"}):
        assert spec_from_config(MAMBA2 | {"time_step_limit": [0.0, infinity]}) == spec_from_config(MAMBA2)
