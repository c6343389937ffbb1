"""Checkpoints in the layouts that people publish: a model so stored computes what transformers computes of its numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import ops
from ops import native
from ops.stored import CODED
from runtime.config import WeightPolicy
from runtime.models.load import load_model
from runtime.models.reading import ParameterReader
from runtime.models.registry import spec_from_config
from runtime.models.spec.sharding import sharded
from runtime.weights.fetch import resolve
from runtime.weights.formats import schemes
from runtime.weights.rules import AS_STORED, WeightsError
from runtime.weights.safetensors_file import SafetensorsCheckpoint
from tests.runtime.models.paged import Paged
from tests.runtime.weights.published import DIALECTS, Dialect

CONFIG = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
IDS = [5, 9, 60, 0, 33, 12, 90, 7]
NATIVE = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
OPTIONS = {"load_format": "auto", "seed": 0, "progress": lambda progress: None}


@pytest.fixture(params=DIALECTS)
def dialect(request) -> Dialect:
    return DIALECTS[request.param]


def write(folder, dialect: Dialect, *, ignored: tuple[str, ...] = (), changes=None, **config):
    """A Llama whose linear layers but the head, and those whose names end so, are quantised -> it, with their numbers."""
    torch.manual_seed(3)
    random = torch.Generator().manual_seed(3)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | config)).eval()
    tensors, texts, state = {}, {}, theirs.state_dict()
    for name, values in state.items():
        if not name.endswith("_proj.weight") or name.removesuffix(".weight").endswith(ignored or ("never",)):
            tensors[name] = values
            continue
        made, numbers = dialect.write(name.removesuffix(".weight"), values, random)
        tensors |= made
        texts |= dialect.texts(name.removesuffix(".weight"))
        values.copy_(numbers)
    folder.mkdir(exist_ok=True)
    tensors |= changes or {}
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, folder / "model.safetensors", texts)
    section = {"architectures": ["LlamaForCausalLM"], "quantization_config": dict(dialect.section)}
    (folder / "config.json").write_text(json.dumps(theirs.config.to_dict() | section))
    return theirs


def write_experts(folder, dialect: Dialect):
    """A Mixtral whose linear layers but head and routers are quantised -> it, with their numbers."""
    torch.manual_seed(5)
    random = torch.Generator().manual_seed(5)
    config = transformers.MixtralConfig(**CONFIG | EXPERTS)
    theirs = transformers.MixtralForCausalLM(config).eval()
    tensors, texts = {}, {}
    for name, values in theirs.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            base = name.rpartition(".experts.")[0] + ".experts"
            for expert in range(len(values)):
                halves = values[expert].chunk(2) if "gate_up" in name else [values[expert]]
                for half, called in zip(halves, ("w1", "w3") if "gate_up" in name else ("w2",), strict=True):
                    made, numbers = dialect.write(f"{base}.{expert}.{called}", half, random)
                    half.copy_(numbers)
                    tensors |= made
                    texts |= dialect.texts(f"{base.replace('.mlp.', '.block_sparse_moe.')}.{expert}.{called}")
        elif name.endswith("_proj.weight"):
            made, numbers = dialect.write(name.removesuffix(".weight"), values, random)
            values.copy_(numbers)
            tensors |= made
            texts |= dialect.texts(name.removesuffix(".weight"))
        else:
            tensors[name] = values
    tensors = {name.replace(".mlp.", ".block_sparse_moe."): each.contiguous().clone() for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors", texts)
    section = {"architectures": ["MixtralForCausalLM"], "quantization_config": dict(dialect.section)}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | section))
    return theirs


def load(folder, dtype="float32", **options):
    files = resolve(str(folder), None, lambda progress: None)
    return load_model(files, dtype=dtype, **OPTIONS | options)


def logits(decoder) -> torch.Tensor:
    return Paged(decoder, 1, 16).step({0: IDS})[0]


@torch.inference_mode()
def test_its_numbers_are_transformers(dialect, tmp_path):
    theirs = write(tmp_path, dialect)
    torch.testing.assert_close(logits(load(tmp_path)), theirs(torch.tensor([IDS])).logits[0], rtol=1e-4, atol=1e-4)


def test_rows_from_anywhere_are_those_of_the_whole_weight(dialect, tmp_path):
    """As numbers, and as kernels take them. Spans begin within blocks and behind the first 256 scales; groups without a negative
    number have the zero point 0."""
    random = torch.Generator().manual_seed(7)
    weight = torch.randn(224, 128, generator=random)
    weight[200:] = weight[200:].abs()
    tensors, numbers = dialect.write("q", weight, random)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors", dialect.texts("q")
    )
    checkpoint = SafetensorsCheckpoint(tmp_path, schemes({"quantization_config": dialect.section}))
    for first, stop in ((0, 224), (5, 9), (50, 224), (150, 217)):
        read = np.empty((stop - first, 128), np.float32)
        checkpoint.read_rows("q.weight", first, read)
        found = [torch.from_numpy(read)]
        if ops.WeightFormat(written := checkpoint.types["q.weight"]) in CODED:
            rows = {
                role: torch.from_numpy(each) for role, each in checkpoint.read_stored("q.weight", first, stop).items()
            }
            found.append(ops.dequantize(ops.StoredWeight.as_written(written, rows)))
        for each in found:
            torch.testing.assert_close(each, numbers[first:stop], rtol=1e-5, atol=1e-6)


@NATIVE
@torch.inference_mode()
def test_on_a_cpu_what_a_packed_kernel_reads_stays_in_its_bits(dialect, tmp_path):
    theirs = write(tmp_path, dialect)
    kept, wide = load(tmp_path, weights=WeightPolicy("stored", keep_quantized=True)), load(tmp_path)
    ours, expected = logits(kept), theirs(torch.tensor([IDS])).logits[0]
    assert (
        ours - expected
    ).norm() < 0.04 * expected.norm()  # activations are rounded to eight bits, some ten times in a row
    # Codes whose columns stand in an order of their own become numbers, and so do fp8 and blocks that kernels cannot cut.
    stays = dialect.format != "fp8" and not dialect.ordered and "across" not in dialect.format
    assert (kept.weights_bytes < 0.6 * wide.weights_bytes) == stays


@NATIVE
@torch.inference_mode()
@pytest.mark.parametrize("name", ["gptq, desc_act", "pack-quantized, asymmetric", "int-quantized", "bitsandbytes, nf4"])
def test_stored_codes_are_rounded_to_sixteen_bits_where_that_is_asked(name, tmp_path):
    theirs = write(tmp_path, DIALECTS[name])
    policy = WeightPolicy("stored", keep_quantized=True, online="int16")
    ours, expected = logits(load(tmp_path, weights=policy)), theirs(torch.tensor([IDS])).logits[0]
    assert (ours - expected).norm() < 0.0005 * expected.norm()


@pytest.mark.parametrize("name", ["awq", "fp8, blocks of 128", "pack-quantized"])
@torch.inference_mode()
def test_a_layer_that_is_left_out_is_read_as_it_is(name, tmp_path):
    theirs = write(tmp_path, DIALECTS[name], ignored=("k_proj", "down_proj"))
    torch.testing.assert_close(logits(load(tmp_path)), theirs(torch.tensor([IDS])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "gptq, asymmetric", "fp8, blocks of 48 by 64", "int-quantized", "pack-quantized, asymmetric", "bitsandbytes, nf4",
        "torchao, int4", "modelopt, nvfp4",
    ],
)  # fmt: skip
def test_a_shard_holds_its_rows_and_columns_with_their_scales(name, tmp_path, monkeypatch):
    """As kernels take them, and as numbers."""
    write(tmp_path, DIALECTS[name], intermediate_size=512, hidden_size=512)
    monkeypatch.setattr(ops, "linear_refusal", lambda formats, *_: None)
    files = resolve(str(tmp_path), None, lambda progress: None)
    spec = spec_from_config(files.config)
    for rank in range(2):
        part, found = sharded(spec, rank, 2), []
        for keep in (True, False):
            with files.open_tensors("auto", {}, 0) as source:
                policy = WeightPolicy("float32", keep_quantized=keep)
                reader = ParameterReader(part, source, policy, "float32", torch.device("cpu"))
                found.append(dict(reader.read(lambda progress: None)))
        for parameter, stored in found[0].items():
            wide = found[1][parameter]
            parts = [stored] if isinstance(stored, ops.StoredWeight) else stored
            numbers = torch.cat([ops.dequantize(each) for each in parts])
            torch.testing.assert_close(numbers, wide.weight, rtol=1e-6, atol=0, msg=parameter)
        assert any(isinstance(stored, list) for stored in found[0].values())


def test_parts_in_different_orders_become_numbers_and_say_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="oneloop.start")
    dialect, names = DIALECTS["gptq, desc_act"], [f"model.layers.{layer}.self_attn.k_proj" for layer in range(2)]
    other = {f"{name}.g_idx": (torch.arange(128) % 2).int() for name in names}
    write(tmp_path, dialect, changes=other)
    monkeypatch.setattr(ops, "linear_refusal", lambda formats, *_: None)
    files = resolve(str(tmp_path), None, lambda progress: None)
    with files.open_tensors("auto", {}, 0) as source:
        policy = WeightPolicy("float32", keep_quantized=True)
        reader = ParameterReader(spec_from_config(files.config), source, policy, "float32", torch.device("cpu"))
        found = dict(reader.read(lambda progress: None))
    qkv = found["model.layers.0.self_attn.qkv_proj.weight"]
    assert isinstance(qkv, ops.StoredWeight)
    assert "different orders" in caplog.text
    assert reader.storage["model.layers.0.mlp.gate_up_proj.weight"] == AS_STORED


def test_groups_of_several_sizes_are_no_groups(tmp_path):
    name = "model.layers.0.self_attn.k_proj.g_idx"
    write(tmp_path, DIALECTS["gptq, desc_act"], changes={name: torch.zeros(128).int()})
    with pytest.raises(WeightsError, match="groups of several sizes"):
        load(tmp_path)


@torch.inference_mode()
def test_experts_are_quantised_too(dialect, tmp_path):
    theirs = write_experts(tmp_path, dialect)
    torch.testing.assert_close(logits(load(tmp_path)), theirs(torch.tensor([IDS])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("written", [write, write_experts], ids=["llama", "mixtral"])
def test_on_a_gpu_it_computes_what_its_numbers_say(written, dialect, tmp_path):
    written(tmp_path, dialect)
    found = []
    for keep in (True, False):
        model = load(tmp_path, "bfloat16", device="cuda", weights=WeightPolicy("bfloat16", keep_quantized=keep))
        with torch.device("cuda"):
            paged = Paged(model, 1, 64)
            found.append([paged.step({0: list(range(count))})[0].float() for count in (8, 1, 40)])
    # Up to 16 tokens only the order of sums differs, and a zero point between codes, 7 to 9 here, is rounded to a 32nd of a step,
    # where numbers are four on average: 1 % of each product at most. Of more, activations are rounded to eight bits where weights
    # have as many.
    few = 0.04 if dialect.format == "q4" else 0.02
    for bound, ours, theirs in zip((few, few, 0.15), *found, strict=True):
        assert (ours - theirs).norm() < bound * theirs.norm()
