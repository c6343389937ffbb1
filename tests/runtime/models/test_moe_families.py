"""Mixtures of experts as their checkpoints may also be: experts in one stack, in half precision, made up, or making no sense."""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime.models.load import load_model
from runtime.models.registry import spec_from_config
from runtime.models.spec.mlp import MoE
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.fetch import resolve
from tests.equality.test_families import FAMILIES, VOCAB
from tests.runtime.models.paged import Paged

MIXTURES = (
    "mixtral", "qwen 2 moe", "qwen 3 moe", "olmoe", "phi-3.5 moe", "granite moe", "granite moe, shared", "gpt-oss",
    "deepseek v2", "deepseek v3", "glm-4.5", "ernie 4.5 moe", "nemotron-h, experts", "lfm2 moe",
)  # fmt: skip


@pytest.fixture(scope="module", params=MIXTURES)
def theirs(request):
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param].config(), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
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


def test_experts_may_be_written_as_one_stack(theirs, tmp_path):
    theirs.save_pretrained(tmp_path, save_original_format=False)
    ours = load(tmp_path)
    assert any(isinstance(block, MoE) for _, block in ours.spec.blocks())
    ids = prompt(50)
    (logits,) = Paged(ours, 1, 64).step({0: ids}).values()
    torch.testing.assert_close(logits, logits_of(theirs, ids), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("qwen 3 moe", {"num_experts_per_tok": 10}, "10 experts per token of 9"),
        ("qwen 3 moe", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen 3 moe", {"mlp_only_layers": ["a"]}, "not a list of layers"),
        ("deepseek v3", {"n_group": 3}, "2 of 3 groups of 8 experts are invalid"),
        ("deepseek v3", {"topk_group": 1}, "1 groups have fewer than 3 experts"),
        ("deepseek v3", {"n_group": 8, "topk_group": 8}, "8 groups of 8 experts have no two experts each"),
        ("deepseek v3", {"rope_interleave": False}, "rope_interleave false"),
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("phi-3.5 moe", {"num_experts_per_tok": 3}, "num_experts_per_tok must be 2"),
        ("ernie 4.5 moe", {"moe_layer_end_index": -3}, "moe_layer_end_index is -3"),
    ],
)
def test_what_makes_no_sense_is_refused(family, changes, says):
    config = FAMILIES[family].config()
    values = config.to_dict()
    name = type(transformers.AutoModelForCausalLM.from_config(config)).__name__
    with pytest.raises(UnsupportedModel, match=says):
        spec_from_config(values | {"architectures": [name]} | changes)


def test_layers_beyond_the_last_are_left_alone(tmp_path):
    """DeepSeek-V3 and GLM-4.5 come with one that predicts the token after next."""
    config = FAMILIES["deepseek v3"].config()
    deeper = transformers.AutoModelForCausalLM.from_config(config)
    deeper.save_pretrained(tmp_path)
    config.num_hidden_layers -= 1
    config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("{", '{"architectures": ["DeepseekV3ForCausalLM"],', 1)
    )
    assert len(load(tmp_path).spec.layers) == config.num_hidden_layers
