"""GGUF files of every supported architecture compute what transformers computes with the weights that they hold."""

from __future__ import annotations

import pytest
import torch

import ops
from runtime.config import WeightPolicy
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from tests.runtime.models.paged import Paged
from tests.runtime.weights.gguf_models import FAMILIES, make


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    theirs = make(family, tmp_path / "model.gguf")
    files = resolve(str(tmp_path / "model.gguf"), None, lambda progress: None)
    ours = load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)
    ids = torch.randint(50, (60,), generator=torch.Generator().manual_seed(2))
    logits = Paged(ours, 1, 60).step({0: ids.tolist()})[0]
    torch.testing.assert_close(logits, theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2moe", "qwen3moe", "gpt-oss"])
def test_matrices_and_experts_may_stay_as_they_are_stored(family, tmp_path):
    if ops.linear_refusal([ops.WeightFormat("Q4_1")], torch.float32, torch.device("cpu")):
        pytest.skip("oneloop_native is not built")
    theirs = make(family, tmp_path / "model.gguf")
    files = resolve(str(tmp_path / "model.gguf"), None, lambda progress: None)
    options = {"dtype": "float32", "load_format": "auto", "seed": 0, "progress": lambda progress: None}
    ours = load_model(files, **options, weights=WeightPolicy("stored", keep_quantized=True))
    wide = load_model(files, **options)
    assert ours.weights_bytes < 0.5 * wide.weights_bytes
    ids = torch.randint(50, (60,), generator=torch.Generator().manual_seed(2))
    logits, expected = Paged(ours, 1, 60).step({0: ids.tolist()})[0], theirs(ids[None]).logits[0]
    # Activations are rounded to eight bits; a token near the edge between two experts may take the other one.
    assert torch.nn.functional.cosine_similarity(logits, expected).median() > 0.999


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_what_stays_in_blocks_loses_no_more_than_numbers_of_16_bits(family, tmp_path):
    theirs = make(family, tmp_path / "model.gguf")
    files = resolve(str(tmp_path / "model.gguf"), None, lambda progress: None)
    options = {"dtype": "bfloat16", "load_format": "auto", "seed": 0, "progress": lambda progress: None}
    ids = torch.randint(50, (60,), generator=torch.Generator().manual_seed(2))
    expected, errors = theirs(ids[None]).logits[0].cuda(), []
    for keep in (True, False):
        policy = WeightPolicy("bfloat16", keep_quantized=keep)
        model = load_model(files, **options, device="cuda", weights=policy)
        with torch.device("cuda"):
            logits = Paged(model, 1, 80).step({0: ids.tolist()})[0]
        # Of each token: one near the edge between two experts may take the other.
        errors.append((logits - expected).norm(dim=1).median() / expected.norm(dim=1).median())
    assert errors[0] < 1.5 * errors[1] + 1e-3
