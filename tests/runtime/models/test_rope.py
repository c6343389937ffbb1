"""Rotary tables against transformers', for every scaling and for both spellings of a config."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runtime.models.blocks.rope import cos_sin_table, inverse_frequencies
from runtime.models.registry import spec_from_config
from runtime.models.spec.rope import FactorScaling, Rope

BASE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 128, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
SCALINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, factor given": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    "yarn, mscale": {
        "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False,
        "beta_fast": 16.0, "beta_slow": 2.0,
    },
}  # fmt: skip


FACTORS = {
    "short_factor": [1 + 0.1 * i for i in range(32)], "long_factor": [1 + 0.5 * i for i in range(32)],
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("length", [64, 65, 200])
@pytest.mark.parametrize("extra", [{}, {"factor": 8.0}, {"attention_factor": 1.2}, {"factor": 1.0}])
def test_longrope_takes_its_long_factors_where_contexts_may_be_long(length, extra):
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS, **extra}
    spec = spec_from_config(BASE | {"rope_parameters": parameters})
    table = cos_sin_table(spec.attention.rope, length)
    torch.testing.assert_close(table, theirs(parameters, length), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "parameters", [{}, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.5, "factor": 4.0}]
)
def test_proportional_scaling_turns_few_pairs_of_all(parameters):
    parameters = {"rope_type": "proportional", "rope_theta": 10000.0, **parameters}
    spec = spec_from_config(BASE | {"rope_parameters": parameters})
    config = transformers.LlamaConfig(
        **{k: v for k, v in BASE.items() if k != "architectures"}, rope_parameters=parameters
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["proportional"](config)
    assert factor == 1.0
    torch.testing.assert_close(inverse_frequencies(spec.attention.rope, 256), frequencies)


def theirs(scaling: dict, num_positions: int) -> torch.Tensor:
    config = transformers.LlamaConfig(
        **{k: v for k, v in BASE.items() if k != "architectures"}, rope_parameters=scaling
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("version", [4, 5])
def test_tables_equal_transformers(scaling, theta, version):
    parameters = {"rope_type": scaling.partition(",")[0], **SCALINGS[scaling]}
    if version == 5:
        config = BASE | {"rope_parameters": {"rope_theta": theta, **parameters}}
    else:
        config = BASE | {"rope_theta": theta, "rope_scaling": None if scaling == "default" else parameters}
    spec = spec_from_config(config)
    table = cos_sin_table(spec.attention.rope, spec.max_model_len)
    assert table.dtype == torch.float32
    expected = theirs({"rope_theta": theta, **parameters}, spec.max_model_len)
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-5)


def test_the_oldest_spelling_is_read_too():
    config = BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert spec_from_config(config) == spec_from_config(
        BASE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    )


def test_factors_of_a_gguf_file_are_llama3_scaling_in_other_words():
    rope = spec_from_config(BASE | {"rope_scaling": {"rope_type": "llama3", **SCALINGS["llama3"]}}).attention.rope
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    wavelengths = 2 * torch.pi / plain
    smooth = ((128 / wavelengths - 1) / 3).clamp(0, 1)
    factors = 1 / ((1 - smooth) / 8 + smooth)
    config = BASE | {"rope_scaling": {"rope_type": "factors", "factors": factors.tolist()}}
    by_factors = spec_from_config(config).attention.rope
    assert isinstance(by_factors.scaling, FactorScaling)
    torch.testing.assert_close(cos_sin_table(by_factors, 256), cos_sin_table(rope, 256), rtol=1e-5, atol=1e-5)


def test_a_partial_rotation_has_a_narrower_table():
    rope = spec_from_config(BASE | {"partial_rotary_factor": 0.5}).attention.rope
    assert rope == Rope(32, 10000.0)
    assert cos_sin_table(rope, 10).shape == (10, 32)
