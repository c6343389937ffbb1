"""Checkpoints that a scheme's own package has written: what is read of them are its own numbers. Where one is not installed, its
tests are left out; test_quantised_checkpoints.py has the same layouts by their descriptions."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.runtime.weights.test_quantised_checkpoints import CONFIG, IDS, load, logits


def written(folder, section, quantise):
    """A Llama whose linear layers but the head are what `quantise` makes of (name, module) -> it, with their numbers.

    quantise: -> tensors by name, texts of the header, numbers."""
    torch.manual_seed(4)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    layers = {
        name: each for name, each in theirs.named_modules() if isinstance(each, torch.nn.Linear) and name != "lm_head"
    }
    tensors = {name: each for name, each in theirs.state_dict().items() if name.removesuffix(".weight") not in layers}
    metadata = {}
    for name, layer in layers.items():
        made, texts, numbers = quantise(name, layer)
        tensors |= made
        metadata |= texts
        layer.weight.data = numbers.float()
    save_file(
        {name: each.contiguous().clone() for name, each in tensors.items()}, folder / "model.safetensors", metadata
    )
    said = {"architectures": ["LlamaForCausalLM"], "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(theirs.config.to_dict() | said))
    return theirs


@torch.inference_mode()
def agree(folder, theirs):
    torch.testing.assert_close(logits(load(folder)), theirs(torch.tensor([IDS])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_bitsandbytes_of_four_bits(kind, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantise(name, layer):
        codes, state = functional.quantize_4bit(
            layer.weight.data, quant_type=kind, compress_statistics=nested, blocksize=64
        )
        tensors = {f"{name}.weight": codes} | {
            f"{name}.weight.{key}": each for key, each in state.as_dict(packed=True).items()
        }
        return tensors, {}, functional.dequantize_4bit(codes, state)

    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    agree(tmp_path, written(tmp_path, section, quantise))


@pytest.mark.parametrize(
    "how",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "groups of 32", "int4", "int4, asymmetric", "int8, asymmetric"],
)
def test_torchao(how, tmp_path):
    api = pytest.importorskip("torchao.quantization")
    flatten = pytest.importorskip("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict

    def config():
        if how.endswith("Config"):
            return getattr(api, how)()
        if how == "groups of 32":
            return api.Int8WeightOnlyConfig(granularity=api.PerGroup(32))
        mapping = api.MappingType.ASYMMETRIC if "asymmetric" in how else api.MappingType.SYMMETRIC
        dtype = torch.int4 if "int4" in how else torch.int8
        return api.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=api.PerGroup(32), mapping_type=mapping)

    def quantise(name, layer):
        alone = torch.nn.Sequential(torch.nn.Linear(layer.in_features, layer.out_features, bias=False))
        alone[0].weight.data = layer.weight.data
        api.quantize_(alone, config())
        tensors, texts = flatten({f"{name}.weight": alone[0].weight})
        return tensors, texts, alone[0].weight.dequantize()

    agree(tmp_path, written(tmp_path, {"quant_method": "torchao"}, quantise))


def test_nvfp4_of_compressed_tensors(tmp_path):
    base = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)

    def quantise(name, layer):
        weight = layer.weight.data
        of_all = (448 * 6 / weight.abs().max()).reshape(1)
        scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 * of_all).to(torch.float8_e4m3fn).float()
        state = {"weight": weight, "weight_scale": scales, "weight_global_scale": of_all}
        made = base.NVFP4PackedCompressor.compress(state, scheme)
        numbers = base.NVFP4PackedCompressor.decompress(made, scheme)["weight"]
        return {f"{name}.{role}": each for role, each in made.items()}, {}, numbers

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    theirs = written(tmp_path, section, quantise)
    with torch.inference_mode():
        ours, expected = logits(load(tmp_path)), theirs(torch.tensor([IDS])).logits[0]
    assert (ours - expected).norm() < 1e-2 * expected.norm()  # their numbers are rounded to 16 bits


@pytest.mark.parametrize(
    ("name", "compressor", "bits", "exponent", "format"),
    [
        ("mxfp4", "MXFP4PackedCompressor", 4, 2, "mxfp4-pack-quantized"),
        ("mxfp8", "MXFP8QuantizationCompressor", 8, 8, "mxfp8-quantized"),
    ],
)
def test_mx_of_compressed_tensors(tmp_path, name, compressor, bits, exponent, format):
    """`exponent`: of the largest of a group in its type, once it is scaled."""
    base = pytest.importorskip(f"compressed_tensors.compressors.{name}.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    args = quantization.QuantizationArgs(**weights, scale_dtype=torch.uint8)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    theirs = getattr(base, compressor)

    def quantise(name, layer):
        weight = layer.weight.data
        scales = torch.exp2(torch.floor(torch.log2(weight.unflatten(1, (-1, 32)).abs().amax(2))) - exponent)
        made = theirs.compress({"weight": weight, "weight_scale": scales}, scheme)
        numbers = theirs.decompress(made, scheme)["weight"]
        return {f"{name}.{role}": each for role, each in made.items()}, {}, numbers

    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    agree(tmp_path, written(tmp_path, section, quantise))
