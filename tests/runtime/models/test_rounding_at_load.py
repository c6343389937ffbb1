"""`--quantization fp8` and `int4`: matrices are rounded as they come, but those whose few bits would cost more than they save."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import ops
from ops.gemm.dequantize import dequantize
from runtime.config import WeightPolicy
from runtime.models.load import load_model, opened
from runtime.models.registry import spec_from_config
from runtime.weights.fetch import resolve
from runtime.weights.rules import stored_as
from runtime.weights.stream import DummyCheckpoint, TensorStream
from tests.runtime.models.paged import Paged

ROUNDINGS = {"fp8": ops.round_to_fp8, "w4": ops.round_to_w4}
COMMON = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"]}
MIXTRAL = COMMON | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


class Drawn:
    """A checkpoint of random numbers."""

    def __init__(self, config):
        self.config = config

    def open_tensors(self, load_format, expected, seed):
        return TensorStream(DummyCheckpoint(expected, seed))


def read(config, online) -> dict[str, str]:
    """The format in which each matrix comes."""
    spec = spec_from_config(config)
    files, policy = Drawn(config), WeightPolicy("bfloat16", online=online)
    with opened(spec, files, dtype="bfloat16", load_format="dummy", seed=0, device="cpu", policy=policy) as reader:
        found = {name: stored for name, stored in reader.read(lambda progress: None) if stored.weight.dim() == 2}
        assert {name: {str(stored.format)} for name, stored in found.items() if name in reader.storage} == {
            name: set(reader.formats(name)) for name in reader.storage
        }
    return {name: str(stored.format) for name, stored in found.items()}


@pytest.mark.parametrize("online", ROUNDINGS)
def test_all_matrices_but_the_ends_are_rounded(online):
    formats = read(LLAMA, online)
    wide = {name for name, written in formats.items() if written == "bfloat16"}
    assert wide == {"model.embed_tokens.weight", "lm_head.weight"}
    assert {written for name, written in formats.items() if name not in wide} == {online}


@pytest.mark.parametrize("online", ROUNDINGS)
@pytest.mark.parametrize(("changes", "named"), [({"hidden_size": 96}, "gate_up"), ({"intermediate_size": 136}, "down")])
def test_what_cannot_be_cut_for_matrix_units_stays_wide(changes, named, online):
    formats = read(LLAMA | changes, online)
    assert {written for name, written in formats.items() if named in name} == {"bfloat16"}


@pytest.mark.parametrize("online", ROUNDINGS)
def test_routers_stay_wide_and_experts_where_no_kernel_reads_them(caplog, online):
    caplog.set_level("INFO", logger="oneloop.start")
    formats = read(MIXTRAL, online)
    assert {written for name, written in formats.items() if name.endswith("gate.weight")} == {"bfloat16"}
    assert {written for name, written in formats.items() if ".experts." in name} == {"bfloat16"}
    assert f"experts are not rounded to {online}: " in caplog.text
    assert formats["model.layers.0.self_attn.o_proj.weight"] == online


@pytest.mark.parametrize("online", ROUNDINGS)
def test_experts_of_which_some_cannot_be_rounded_stay_wide_together(monkeypatch, caplog, online):
    """As on a GPU, whose kernels read all matrices of a layer's experts in one format."""
    caplog.set_level("INFO", logger="oneloop.start")
    monkeypatch.setattr(ops, "moe_refusal", lambda formats, *_: "not together" if len(formats) > 1 else None)
    even, uneven = read(MIXTRAL, online), read(MIXTRAL | {"intermediate_size": 136}, online)
    assert {written for name, written in even.items() if ".experts." in name} == {online}
    assert {written for name, written in uneven.items() if ".experts." in name} == {"bfloat16"}
    assert f"experts in bfloat16 and {online} become bfloat16: not together" in caplog.text


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("online", "bounds"), [("fp8", (0.02, 0.02, 0.2)), ("w4", (0.03, 0.03, 0.03))], ids=str)
def test_a_model_computes_what_its_rounded_numbers_say(online, bounds, dtype, tmp_path):
    """In fp8, of more than 16 tokens activations are rounded, too."""
    spec, random = spec_from_config(LLAMA), torch.Generator().manual_seed(1)
    shards = [shard for each in spec.parameters() for shard in stored_as(each, spec.rules).shards]
    tensors = {
        each.name: torch.ones(each.shape)
        if each.name.endswith("norm.weight")
        else torch.randn(each.shape, generator=random) / 8
        for each in shards
    }
    tensors = {name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}
    logits = {}
    for name in ("rounded", "wide"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "wide":
            for key in [key for key in tensors if key.endswith("_proj.weight")]:
                tensors[key] = dequantize(ROUNDINGS[online](ops.StoredWeight.dense(tensors[key])))
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(LLAMA))
        files = resolve(str(folder), None, lambda progress: None)
        policy = WeightPolicy(dtype, online=online if name == "rounded" else None)
        options = {"load_format": "auto", "seed": 0, "progress": lambda progress: None, "device": "cuda"}
        model = load_model(files, dtype=dtype, weights=policy, **options)
        with torch.device("cuda"):
            paged = Paged(model, 1, 64)
            logits[name] = [paged.step({0: list(range(count))})[0].float() for count in (12, 1, 30)]
    for bound, ours, theirs in zip(bounds, logits["rounded"], logits["wide"], strict=True):
        assert (ours - theirs).norm() < bound * theirs.norm()
