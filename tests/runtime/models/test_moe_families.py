"""Mixtures of experts against transformers: tiny random models of every family, in each way that checkpoints are written."""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime.models.load import load_model
from runtime.models.registry import spec_from_config
from runtime.models.spec import MoE, UnsupportedModel
from runtime.weights.fetch import resolve
from tests.runtime.models.paged import Paged

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
}  # fmt: skip
QWEN = COMMON | {"moe_intermediate_size": 24, "num_experts": 9, "num_experts_per_tok": 3}
MODELS = {
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=36),
    "qwen2_moe, some layers dense": lambda: transformers.Qwen2MoeConfig(
        **QWEN, shared_expert_intermediate_size=36, decoder_sparse_step=2, qkv_bias=False, norm_topk_prob=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**QWEN, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]),
    "olmoe": lambda: transformers.OlmoeConfig(**COMMON, num_experts=8, num_experts_per_tok=3),
    "olmoe, bounded": lambda: transformers.OlmoeConfig(**COMMON, num_experts=8, num_experts_per_tok=3, clip_qkv=1.5),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **COMMON, num_local_experts=6, num_experts_per_tok=3, attention_multiplier=0.2, residual_multiplier=0.4,
        embedding_multiplier=3.0, logits_scaling=2.0, tie_word_embeddings=True,
    ),
    "granitemoeshared": lambda: transformers.GraniteMoeSharedConfig(
        **COMMON, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=28, residual_multiplier=0.4
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def theirs(request):
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[request.param](), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms begin as zeros and ones, which hides mistakes
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def load(folder, **options):
    files = resolve(str(folder), None, lambda progress: None)
    defaults = {"dtype": "float32", "load_format": "auto", "seed": 0, "progress": lambda progress: None}
    return load_model(files, **defaults | options)


def prompt(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.inference_mode()
def logits_of(theirs, ids) -> torch.Tensor:
    return theirs(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("written", ["as transformers 4 does", "as transformers 5 may"])
def test_logits_are_transformers_own(theirs, tmp_path, written):
    theirs.save_pretrained(tmp_path, save_original_format=written == "as transformers 4 does")
    ours = load(tmp_path)
    assert any(isinstance(layer.mlp, MoE) for layer in ours.spec.layers)
    assert ours.num_parameters == theirs.num_parameters()
    ids = prompt(70)
    (logits,) = Paged(ours, 1, 96).step({0: ids}).values()
    torch.testing.assert_close(logits, logits_of(theirs, ids), rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(theirs, tmp_path, dtype):
    theirs.save_pretrained(tmp_path)
    half = load(tmp_path, dtype=dtype)
    ids = prompt(12)
    (logits,) = Paged(half, 1, 16).step({0: ids}).values()
    assert logits.dtype == getattr(torch, dtype)
    # A token near the edge between two experts may take the other one: only most of them must agree.
    closeness = torch.nn.functional.cosine_similarity(logits.float(), logits_of(theirs, ids))
    assert closeness.median() > 0.99


def test_dummy_weights_need_no_checkpoint(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    ours = load(tmp_path, load_format="dummy")
    (logits,) = Paged(ours, 1, 16).step({0: prompt(5)}).values()
    assert logits.isfinite().all()


def test_counts_that_make_no_sense_are_refused(tmp_path):
    for changes, says in (
        ({"num_experts_per_tok": 10}, "10 experts per token of 9"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"mlp_only_layers": ["a"]}, "not a list of layers"),
    ):
        config = MODELS["qwen3_moe"]().to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]} | changes
        with pytest.raises(UnsupportedModel, match=says):
            spec_from_config(config)
