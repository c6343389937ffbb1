from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from runtime.weights.rules import WeightsError
from runtime.weights.safetensors_file import INDEX, SafetensorsCheckpoint

DTYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16}


def as_torch(values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def save_header(path, header, data=b"", length=None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_rows_are_read_and_rounded_as_torch_rounds(tmp_path, stored, wanted):
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(1)).mul(1e3)
    weight[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    save_file({"w": weight.to(stored), "other": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.shapes == {"w": (7, 33), "other": (3,)}
    for start, stop in ((0, 7), (2, 5), (6, 7)):
        out = np.empty((stop - start, 33), DTYPES[wanted])
        checkpoint.read_rows("w", start, out)
        torch.testing.assert_close(
            as_torch(out), weight.to(stored).to(wanted)[start:stop], rtol=0, atol=0, equal_nan=True
        )
    checkpoint.close()


def test_bfloat16_rounds_every_pattern_of_lower_bits_as_torch(tmp_path):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    values = torch.from_numpy(bits.view(np.float32))
    save_file({"w": values}, tmp_path / "model.safetensors")
    out = np.empty(len(bits), np.uint16)
    SafetensorsCheckpoint(tmp_path).read_rows("w", 0, out)
    torch.testing.assert_close(as_torch(out), values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_shards_are_one_checkpoint(tmp_path):
    save_file({"a": torch.ones(2), "stale": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.shapes == {"a": (2,), "b": (3,)}
    out = np.empty(3, np.float32)
    checkpoint.read_rows("b", 0, out)
    assert out.tolist() == [0, 0, 0]


def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path):
    save_file({"w": torch.ones(4, dtype=torch.bool)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="tensor w is BOOL"):
        SafetensorsCheckpoint(tmp_path).read_rows("w", 0, np.empty(4, np.float32))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty file": b"",
    "five bytes": b"12345",
    "longer header than file": struct.pack("<Q", 1 << 60) + b"{}",
    "no JSON": struct.pack("<Q", 3) + b"{x}",
    "a list": struct.pack("<Q", 2) + b"[]",
    "deep JSON": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "an entry of text": {"w": "F32"},
    "no offsets": {"w": {"dtype": "F32", "shape": [2]}},
    "three offsets": {"w": {**ENTRY, "data_offsets": [0, 4, 8]}},
    "past the end": {"w": {**ENTRY, "shape": [9], "data_offsets": [0, 36]}},
    "backwards": {"w": {**ENTRY, "data_offsets": [8, 0]}},
    "negative": {"w": {**ENTRY, "data_offsets": [-8, 0]}},
    "negative shape": {"w": {**ENTRY, "shape": [-1, -2]}},
    "shape of text": {"w": {**ENTRY, "shape": "22"}},
    "shape of truth": {"w": {**ENTRY, "shape": [True, 2]}},
    "overflow": {"w": {**ENTRY, "shape": [1 << 62, 4]}},
    "too short for its shape": {"w": {**ENTRY, "shape": [3]}},
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "model.safetensors"
    if isinstance(BROKEN[content], bytes):
        path.write_bytes(BROKEN[content])
    else:
        save_header(path, BROKEN[content], bytes(8))
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


@given(at=st.integers(0, 160), new=st.binary(min_size=1, max_size=6))
def test_whatever_bytes_are_changed_it_reads_or_refuses(tmp_path, at, new):
    path = tmp_path / "model.safetensors"
    save_header(path, {"w": ENTRY, "x": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16))
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)
    try:
        checkpoint = SafetensorsCheckpoint(tmp_path)
        for name, shape in checkpoint.shapes.items():
            if shape == (2,):
                checkpoint.read_rows(name, 0, np.empty(2, np.float32))
        checkpoint.close()
    except WeightsError:
        pass


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "cannot be read"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"b": "here.safetensors"}}, "b should be there"),
        ({"weight_map": []}, "not an index"),
        ({}, "not an index"),
        ([], "not an index"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, index, says):
    save_file({"a": torch.ones(2)}, tmp_path / "here.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=says):
        SafetensorsCheckpoint(tmp_path)


def test_pickles_are_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*never loaded"):
        SafetensorsCheckpoint(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"no \.safetensors files"):
        SafetensorsCheckpoint(tmp_path)
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match="says what is where"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("file", ["a\0b.safetensors", "\0"])
def test_an_index_that_names_what_no_file_can_be_called_is_refused(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(WeightsError, match="not a file beside it"):
        SafetensorsCheckpoint(tmp_path)


def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="is not a file"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_a_tensor_of_nothing_is_read_as_nothing(tmp_path, shape):
    save_file({"w": torch.zeros(shape)}, tmp_path / "model.safetensors")
    out = np.empty(shape, np.float32)
    SafetensorsCheckpoint(tmp_path).read_rows("w", 0, out)
    assert SafetensorsCheckpoint(tmp_path).read_stored("w", 0, shape[0])["weight"].size == 0
