"""A scheme of its own: eight-bit numbers with a scale for each two rows. To the rules it is one tensor; rows are cut and merged
with what belongs to them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ops.stored import NF4, TABLES
from runtime.weights.formats import codes, quant_method, refusal, schemes
from runtime.weights.formats.scheme import Composite
from runtime.weights.rules import AS_STORED, Cut, Parameter, Span, WeightsError, merge, plan, reduced
from runtime.weights.safetensors_file import SafetensorsCheckpoint
from runtime.weights.stream import TensorStream

RULES = (merge("q k", into="qk"),)
QK = Parameter("qk.weight", (12, 8), (8, 4))


class TwoRows:
    ignored = ()

    def composites(self, stored):
        for name, (dtype, shape) in stored.items():
            if dtype == "I8":
                yield Composite(name, shape, {"weight": name, "scales": f"{name}_scale"}, TwoRowsWritten())


class TwoRowsWritten:
    format = "TWO"
    whole = False

    def rows(self, role, span):
        return span if role == "weight" else Span(span.start // 2, -(-span.stop // 2))

    def stored_form(self, raw, span):
        return {"weight": raw["weight"], "scales": raw["scales"]}

    def columns(self, arrays, span):
        raise WeightsError(f"columns of weights in {self.format} are not cut")

    def decode(self, raw, out, first_row):
        scales = np.repeat(raw["scales"].view(np.float32), 2, axis=0)[: len(out)]
        out[...] = raw["weight"].view(np.int8) * scales


@pytest.fixture
def made(tmp_path):
    """Checkpoint, and its numbers by name."""
    random = torch.Generator().manual_seed(0)
    tensors, values = {}, {}
    for name, rows in (("q.weight", 8), ("k.weight", 4)):
        weight = torch.randint(-127, 128, (rows, 8), generator=random, dtype=torch.int8)
        scale = torch.rand((rows // 2, 1), generator=random)
        tensors |= {name: weight, f"{name}_scale": scale}
        values[name] = (weight * scale.repeat_interleave(2, 0)).numpy()
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsCheckpoint(tmp_path, (TwoRows(),)), np.concatenate([values["q.weight"], values["k.weight"]])


def read(checkpoint, load, storage):
    with TensorStream(checkpoint) as source:
        ((_, values),) = source.stream([load], "float32", lambda progress: None, {"qk.weight": storage})
    return values


def test_scales_are_part_of_a_weight_and_not_surplus(made):
    checkpoint, values = made
    assert checkpoint.shapes == {"q.weight": (8, 8), "k.weight": (4, 8)}
    assert set(checkpoint.types.values()) == {"TWO"}
    assert checkpoint.stored_bytes("q.weight") == 8 * 8 + 4 * 4
    (load,) = plan([QK], RULES, checkpoint.shapes)
    assert np.array_equal(read(checkpoint, load, "float32"), values)


def test_rows_as_kernels_take_them_come_with_their_scales(made):
    checkpoint, values = made
    (load,) = plan([QK], RULES, checkpoint.shapes)
    parts = read(checkpoint, load, AS_STORED)
    assert [(part.format, *(part.arrays[role].shape for role in ("weight", "scales"))) for part in parts] == [
        ("TWO", (8, 8), (4, 4)), ("TWO", (4, 8), (2, 4)),
    ]  # fmt: skip
    back = np.empty((8, 8), np.float32)
    TwoRowsWritten().decode(parts[0].arrays, back, 0)
    assert np.array_equal(back, values[:8])


@pytest.mark.parametrize("storage", ["float32", AS_STORED])
def test_a_shard_of_the_rows_has_their_scales(made, storage):
    checkpoint, values = made
    (load,) = plan([QK], RULES, checkpoint.shapes)
    cut = Cut((12, 8), (Span(4, 8), Span(10, 12)), None)
    read_back = read(checkpoint, reduced(load, Parameter("qk.weight", (6, 8), (4, 2)), cut), storage)
    if storage == AS_STORED:
        parts = [np.empty((len(part.arrays["weight"]), 8), np.float32) for part in read_back]
        for part, out in zip(read_back, parts, strict=True):
            TwoRowsWritten().decode(part.arrays, out, 0)
        read_back = np.concatenate(parts)
    assert np.array_equal(read_back, np.concatenate([values[4:8], values[10:12]]))


def test_columns_of_a_format_that_nobody_can_cut_are_refused_by_name(made):
    checkpoint, _ = made
    (load,) = plan([QK], RULES, checkpoint.shapes)
    cut = reduced(load, Parameter("qk.weight", (12, 4), (8, 4)), Cut((12, 8), (Span(0, 12),), Span(4, 8)))
    with pytest.raises(WeightsError, match=r"q\.weight: columns of weights in TWO are not cut"):
        read(checkpoint, cut, AS_STORED)


@pytest.mark.parametrize(
    ("config", "method", "why"),
    [
        ({}, None, None),
        ({"quantization_config": None}, None, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4", None),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8", None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq", None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "gptq", "'gptq' are not supported in 3 bits"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "awq", "in the layout gemv"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt", None),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}, "modelopt", "algorithm W4A8_AWQ"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes", None),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes", None),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes", "in neither eight nor four bits"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}},
         "bitsandbytes", "in bytes that are stored as bfloat16"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": [128, 128]}}}}},
         "compressed-tensors", "in integers with a scale a block of rows and columns"),
        ({"quantization_config": {"quant_method": "torchao"}}, "torchao", None),
        ({"quantization_config": {"bits": 4}}, "None", "'None'"),
        ({"quantization_config": "hqq"}, "hqq", "'hqq'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 3}}, "fp8", "is not understood"),
    ],
)  # fmt: skip
def test_a_config_says_what_its_weights_are_quantised_with(config, method, why):
    assert quant_method(config) == method
    said = refusal(config)
    assert said is None if why is None else why in str(said)


def test_what_a_place_is_worth_is_the_same_to_readers_and_kernels():
    assert {kind.name: tuple(np.float32(each) for each in table) for kind, table in TABLES.items()} == {
        name: tuple(table) for name, table in codes.TABLES.items()
    }


def broken(tmp_path, changes):
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [2, 64]} | changes
    tensors = {
        "q.weight": torch.zeros(64, 1, dtype=torch.uint8),
        "q.weight.absmax": torch.ones(2),
        "q.weight.quant_map": torch.tensor(TABLES[NF4]),
        "q.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsCheckpoint(
        tmp_path, schemes({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": [4, 64]}, "not 128 of U8"),
        ({"blocksize": 32}, "not 4 of F32"),
        ({"blocksize": 0}, "blocks of 0"),
        ({"shape": 3}, "not iterable"),
        ({"nested_blocksize": 256}, "not 2 of U8"),
    ],
)
def test_a_state_that_does_not_fit_its_tensors_is_named(changes, why, tmp_path):
    assert broken(tmp_path, {}).shapes == {"q.weight": (2, 64)}
    with pytest.raises(WeightsError, match=rf"q\.weight\.quant_state.*{why}"):
        broken(tmp_path, changes)


def test_a_torchao_tensor_of_another_kind_is_named(tmp_path):
    texts = {"q.weight": json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}}), "tensor_names": '["q.weight"]'}
    save_file({"q._weight_qdata": torch.zeros(2, 4, dtype=torch.int32)}, tmp_path / "model.safetensors", texts)
    with pytest.raises(WeightsError, match=r"q\.weight: a torchao Int4TilePackedTo4dTensor is not supported"):
        SafetensorsCheckpoint(tmp_path, schemes({"quantization_config": {"quant_method": "torchao"}}))
