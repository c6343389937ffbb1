"""GPT-OSS as it is published, its experts in MXFP4: every value is transformers' own, and so are the logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ops
from ops.cuda.program import missing_for_hopper
from runtime.config import WeightPolicy
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from runtime.weights.safetensors_file import SafetensorsCheckpoint
from tests.runtime.models.paged import Paged

EXPERTS, HIDDEN, INNER = 3, 64, 32
CONFIG = transformers.GptOssConfig(
    vocab_size=50, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=9,
)  # fmt: skip


def packed(random: torch.Generator, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(121, 126, shape, generator=random, dtype=torch.uint8)


@pytest.fixture
def theirs(tmp_path):
    """The model, with the weights that are written to tmp_path."""
    torch.manual_seed(4)
    random = torch.Generator().manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows, columns = (2 * INNER, HIDDEN) if "gate_up" in name else (HIDDEN, INNER)
        blocks, scales = packed(random, rows, columns)
        tensors[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    quantised = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    config = CONFIG.to_dict() | {"architectures": ["GptOssForCausalLM"]} | quantised
    (tmp_path / "config.json").write_text(json.dumps(config))
    return model.eval()


def test_two_tensors_are_read_as_one(theirs, tmp_path):
    checkpoint = SafetensorsCheckpoint(tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    assert checkpoint.types[name] == "MXFP4"
    assert checkpoint.shapes[name] == (EXPERTS, 2 * INNER, HIDDEN)
    assert not any(name.endswith("_scales") for name in checkpoint.shapes)
    wanted = theirs.state_dict()[name.removesuffix("_blocks")].transpose(1, 2)
    for start, stop in ((0, 3), (1, 2)):
        out = np.empty((stop - start, 2 * INNER, HIDDEN), np.float32)
        checkpoint.read_rows(name, start, out)
        assert torch.equal(torch.from_numpy(out), wanted[start:stop])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_equal_transformers(theirs, tmp_path, dtype):
    files = resolve(str(tmp_path), None, lambda progress: None)
    ours = load_model(files, dtype=dtype, load_format="auto", seed=0, progress=lambda progress: None)
    ids = torch.randint(50, (40,), generator=torch.Generator().manual_seed(2))
    logits, expected = Paged(ours, 1, 40).step({0: ids.tolist()})[0], theirs(ids[None]).logits[0]
    if dtype == "float32":
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.nn.functional.cosine_similarity(logits.float(), expected).median() > 0.99


def test_blocks_without_scales_are_not_values(tmp_path):
    blocks, scales = packed(torch.Generator().manual_seed(0), 8, 64)
    save_file({"a_blocks": blocks, "a_scales": scales[:, :7].contiguous()}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.shapes) == {"a_blocks", "a_scales"}
    with pytest.raises(WeightsError, match="a_blocks is U8, which is not supported"):
        checkpoint.read_rows("a_blocks", 0, np.empty(blocks.shape, np.float32))


@torch.inference_mode()
def test_on_a_cpu_the_experts_keep_their_numbers_in_five_bits(theirs, tmp_path):
    if refusal := ops.linear_refusal([ops.WeightFormat("MXFP4")], torch.float32, torch.device("cpu")):
        pytest.skip(refusal)
    files = resolve(str(tmp_path), None, lambda progress: None)
    options = {"dtype": "float32", "load_format": "auto", "seed": 0, "progress": lambda progress: None}
    ours = load_model(files, **options, weights=WeightPolicy("stored", keep_quantized=True))
    wide = load_model(files, **options)
    num_in_experts = 2 * EXPERTS * 3 * HIDDEN * INNER
    assert wide.weights_bytes - ours.weights_bytes > 0.8 * 4 * num_in_experts
    ids = torch.randint(50, (40,), generator=torch.Generator().manual_seed(2))
    logits, expected = Paged(ours, 1, 40).step({0: ids.tolist()})[0], theirs(ids[None]).logits[0]
    assert torch.nn.functional.cosine_similarity(logits, expected).median() > 0.999


@pytest.mark.gpu
@pytest.mark.skipif(missing_for_hopper() is not None, reason=str(missing_for_hopper()))
@torch.inference_mode()
def test_on_hopper_the_experts_stay_in_four_bits(theirs, tmp_path):
    files = resolve(str(tmp_path), None, lambda progress: None)
    options = {"dtype": "bfloat16", "load_format": "auto", "seed": 0, "progress": lambda progress: None}
    ids = torch.randint(50, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    found, sizes = [], []
    for keep in (True, False):
        policy = WeightPolicy("bfloat16", keep_quantized=keep)
        model = load_model(files, **options, device="cuda", weights=policy)
        sizes.append(model.weights_bytes)
        with torch.device("cuda"):
            paged = Paged(model, 1, 64)
            found.append([paged.step({0: part})[0].float() for part in (ids, ids[:1])])
    assert sizes[0] < sizes[1]  # by little: a piece has 128 columns
    # A router's choice between two that are nearly as good may be the other.
    for ours, wide in zip(*found, strict=True):
        assert torch.nn.functional.cosine_similarity(ours, wide).median() > 0.999
