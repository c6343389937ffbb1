"""The list of what runs through transformers: a tiny random model of each architecture is saved by transformers and loaded by us,
which runs it beside transformers' own attention and refuses what computes otherwise. And nothing that would run is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runtime.config import WeightPolicy
from runtime.models import implementation
from runtime.models.registry import FAMILIES
from runtime.models.spec.model import UnsupportedModel
from runtime.models.through_transformers.describe import class_refusal, names
from runtime.models.through_transformers.tried import ARCHITECTURES
from runtime.weights.fetch import resolve

SMALL = {
    "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {name: size for name, size in SMALL.items() if name != "head_dim"} | {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
OF_SEVERAL_PARTS = {"text_config": SMALL, "vision_config": VISION, "audio_config": None}
MAX_PARAMETERS = 10_000_000


class NoSmallModel(Exception):
    """transformers makes no small model of an architecture from any of the sizes above."""


def run(architecture: str, folder: Path) -> None:
    """Load a small model of `architecture` as one that is served: the first that transformers makes and we take.

    Raises NoSmallModel where transformers makes none, and UnsupportedModel where we refuse all that it makes."""
    types = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
    refusal: Exception = NoSmallModel(architecture)
    for kind, sizes in [(kind, sizes) for kind in types for sizes in (SMALL, LATENT, OF_SEVERAL_PARTS)]:
        try:
            _save(architecture, kind, sizes, folder)
        except Exception:  # config and model classes refuse sizes in their own ways
            continue
        try:
            return _load(folder)
        except UnsupportedModel as error:
            refusal = error
    raise refusal


def _save(architecture: str, kind: str, sizes: dict[str, Any], folder: Path) -> None:
    model_class, config = getattr(transformers, architecture), CONFIG_MAPPING[kind](**sizes)
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in model_class(config).parameters()) > MAX_PARAMETERS:
            raise NoSmallModel("its config has sizes of other names")
    torch.manual_seed(1)
    model = model_class(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.data.flatten()[0]) if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)


def _load(folder: Path) -> None:
    files = resolve(str(folder), None, lambda progress: None)
    implementation.load(
        implementation.describe(files.config, "transformers"), files, dtype="float32", load_format="auto", seed=0,
        progress=lambda progress: None, max_model_len=128, device="cpu", weights=WeightPolicy("float32"),
    )  # fmt: skip


def test_what_is_native_is_not_listed():
    assert not {*ARCHITECTURES} & {*FAMILIES}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_listed_runs(architecture, tmp_path):
    run(architecture, tmp_path)


def test_what_would_run_is_listed(tmp_path):
    missing, refused = [], 0
    for architecture in sorted(names() - {*FAMILIES, *ARCHITECTURES}):
        if class_refusal(architecture) is None:
            try:
                run(architecture, tmp_path)
            except NoSmallModel:
                continue
            except UnsupportedModel:
                refused += 1
            else:
                missing.append(architecture)
    assert refused  # by what runs a model beside transformers' own attention
    assert not missing
