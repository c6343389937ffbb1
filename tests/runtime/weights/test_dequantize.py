from __future__ import annotations

import gguf
import numpy as np
import pytest

from runtime.weights.dequantize import FORMATS, dequantize


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_blocks", [1, 3, 2049, 5000])
def test_every_bit_is_the_gguf_packages(name, num_blocks):
    """On random bytes, so scales that are infinite or NaN included."""
    block_format = FORMATS[name]
    raw = np.random.default_rng(num_blocks).integers(0, 256, num_blocks * block_format.size, dtype=np.uint8)
    ours = np.full(num_blocks * block_format.weights, 7, np.float32)
    with np.errstate(all="ignore"):
        dequantize(raw, block_format, ours)
        theirs = gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[name]).reshape(-1)
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_the_gguf_packages(name):
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert sizes == (FORMATS[name].weights, FORMATS[name].size)


def test_values_go_where_the_caller_wants_them():
    rows = np.zeros((4, 6), np.float32)
    dequantize(np.arange(12, dtype=np.float32).view(np.uint8), FORMATS["F32"], rows[1:3])
    assert rows[1:3].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert not rows[0].any()
    assert not rows[3].any()
