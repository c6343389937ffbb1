from __future__ import annotations

import os
import struct

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.weights.gguf import GgufFile, GgufTensor
from runtime.weights.rules import WeightsError
from tests.runtime.weights.gguf_bytes import array, example, gguf, key, string, tensor


@pytest.fixture
def write(tmp_path):
    def write(content: bytes):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_metadata_and_tensors_of_a_whole_file(write):
    content, values = example()
    with GgufFile(write(content)) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "tokenizer.ggml.tokens": ["a", "é", ""],
            "tokenizer.ggml.scores": [0.5, -1.0],
            "nested": [[True], []],
        }
        assert file.tensors["weight"].shape == (3, 4)
        assert np.array_equal(file.read("weight"), values)
        assert file.raw_rows(file.tensors["weight"], 1, 3).view(np.float32).tolist() == values[1:3].tolist()


def test_every_kind_of_value_that_the_gguf_package_writes(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf_package.GGUFWriter(path, "test")
    values = {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 1 << 31, "int32": -(1 << 30),
        "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1, "bool": True, "string": "日本",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("words", ["a", "", "ß"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_custom_alignment(64)
    half = np.linspace(-1, 1, 10, dtype=np.float16).reshape(2, 5)
    writer.add_tensor("half", half)
    writer.add_tensor("last", np.float32([1, 2, 3]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        assert values.items() <= file.metadata.items()
        assert file.metadata["words"] == ["a", "", "ß"]
        assert file.metadata["numbers"] == [1, -2, 3]
        assert np.array_equal(file.read("half"), half.astype(np.float32))
        assert file.read("last").tolist() == [1, 2, 3]


@pytest.mark.parametrize(("file_type", "name"), [(15, "Q4_K_M"), (None, "Q8_0"), (9999, "Q8_0"), ("15", "Q8_0")])
def test_the_quantization_is_what_the_file_says_or_has_most_of(write, file_type, name):
    with GgufFile(write(example()[0])) as file:
        file.metadata["general.file_type"] = file_type
        file.tensors = {
            number: GgufTensor(number, (1, 32), type, 0, nbytes)
            for number, type, nbytes in (("a", "F32", 60), ("b", "Q8_0", 34), ("c", "Q8_0", 34))
        }
        assert file.quantization == name


def test_a_type_that_is_not_supported_is_named_with_its_tensor(write):
    path = write(gguf([], [tensor("blk.0.odd", [32, 2], code=20)], bytes(36)))
    with GgufFile(path) as file, pytest.raises(WeightsError, match=r"blk\.0\.odd is IQ4_NL"):
        file.read("blk.0.odd")


def test_a_reopened_file_reads_on_after_the_first_was_closed(write):
    content, values = example()
    file = GgufFile(write(content))
    file.close()
    with file.reopened() as again:
        assert np.array_equal(again.read("weight"), values)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(write):
    content, _ = example()
    path = write(content)
    with GgufFile(path) as file:
        os.truncate(path, len(content) - 4)
        with pytest.raises(WeightsError, match="in the middle of a tensor"):
            file.read("weight")


HUGE = (1 << 64) - 1
HOSTILE = {
    "empty": (b"", "only 0 bytes"),
    "text": (b"<!doctype html> not found, sorry", "not a GGUF file"),
    "version 1": (gguf(version=1), "version 1"),
    "version 99": (gguf(version=99), "version 99"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "tensor count": (gguf(num_tensors=HUGE), "tensors do not fit"),
    "key count": (gguf(num_keys=HUGE), "metadata keys do not fit"),
    "key length": (gguf([struct.pack("<Q", HUGE) + b"x" * 20]), "bytes are announced"),
    "string length": (gguf([key("a", 8, struct.pack("<Q", 1 << 40))]), "bytes are announced"),
    "string in array": (gguf([key("a", 9, array(8, 1, struct.pack("<Q", HUGE)))]), "goes past its end"),
    "numbers": (gguf([key("a", 9, array(10, 1 << 20, b""))]), "bytes are announced"),
    "strings": (gguf([key("a", 9, array(8, 1 << 20, b""))]), "bytes are announced"),
    "array count": (gguf([key("a", 9, array(0, HUGE, b""))]), "all arrays together"),
    "nested arrays": (gguf([key("a", 9, b"".join([array(9, 1, b"")] * 50))]), "deep"),
    "value type": (gguf([key("a", 77, b"")]), "unknown value type 77"),
    "item type": (gguf([key("a", 9, array(77, 1, b""))]), "unknown value type 77"),
    "same key twice": (gguf([key("a", 0, b"\1")] * 2), "'a' occurs twice"),
    "no dimension": (gguf([], [tensor("t", [])], bytes(64)), "0 dimensions"),
    "dimensions": (gguf([], [tensor("t", [1] * 5)], bytes(64)), "5 dimensions"),
    "many dimensions": (gguf([], [string("t") + struct.pack("<I", 1 << 31)], bytes(64)), "dimensions"),
    "zero dimension": (gguf([], [tensor("t", [0, 4])], bytes(64)), "does not divide"),
    "overflow": (gguf([], [tensor("t", [1 << 62, 1 << 62])], bytes(64)), "larger than the file"),
    "overflow to zero": (gguf([], [tensor("t", [1 << 32, 1 << 32])], bytes(64)), "larger than the file"),
    "row of part of a block": (gguf([], [tensor("t", [33], code=8)], bytes(64)), "blocks of Q8_0"),
    "tensor type": (gguf([], [tensor("t", [4], code=4)], bytes(64)), "unknown type 4"),
    "offset": (gguf([], [tensor("t", [4], offset=1 << 63)], bytes(64)), "cut short"),
    "unaligned": (gguf([], [tensor("t", [4], offset=4)], bytes(64)), "not aligned to 32"),
    "cut short": (gguf([], [tensor("t", [32])], bytes(124)), "cut short"),
    "same tensor twice": (gguf([], [tensor("t", [4])] * 2, bytes(64)), "'t' occurs twice"),
    "alignment 0": (gguf([key("general.alignment", 4, bytes(4))]), "not a power of two"),
    "alignment 48": (gguf([key("general.alignment", 4, struct.pack("<I", 48))]), "not a power of two"),
    "alignment of text": (gguf([key("general.alignment", 8, string("32"))]), "not a power of two"),
    "huge alignment": (gguf([key("general.alignment", 10, struct.pack("<Q", 1 << 63))]), "not a power of two"),
}


@pytest.mark.parametrize("content", HOSTILE)
def test_a_broken_or_hostile_file_is_refused_by_name(write, content):
    path = write(HOSTILE[content][0])
    with pytest.raises(WeightsError) as caught:
        GgufFile(path)
    assert HOSTILE[content][1] in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_or_device_is_refused(tmp_path):
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(WeightsError, match="not a file"):
            GgufFile(path)


def test_cut_off_anywhere_it_is_an_error_and_nothing_else(write):
    content, _ = example()
    for length in range(len(content)):
        with pytest.raises(WeightsError):
            GgufFile(write(content[:length]))


@given(changes=st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_whatever_bytes_are_changed_it_reads_or_refuses(write, changes):
    content = bytearray(example()[0])
    for at, new in changes:
        content[at : at + len(new)] = new
    try:
        with GgufFile(write(bytes(content))) as file:
            for name in file.tensors:
                file.read(name)
    except WeightsError:
        pass
