"""Other numbers for a living decoder: what it then computes is, to the bit, what a decoder loaded with them computes."""

from __future__ import annotations

import pytest
import torch

import ops
from ops import native
from runtime.config import WeightPolicy
from runtime.models.load import load_model, opened
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from tests.equality.test_families import FAMILIES, VOCAB
from tests.runtime.models.checkpoints import checkpoint
from tests.runtime.models.paged import Paged
from tests.runtime.weights import gguf_models

OPTIONS = {"load_format": "auto", "seed": 0, "progress": lambda progress: None}
STORED = WeightPolicy("stored", keep_quantized=True)
INT8, INT16 = WeightPolicy("stored", online="int8"), WeightPolicy("stored", online="int16")
NATIVE = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
CASES = [
    ("llama, biases, tied", "float32", None),
    ("qwen2", "bfloat16", None),
    ("gpt-2", "float32", None),
    ("cohere, norms of q and k", "float32", None),
    ("mixtral", "float32", None),
    ("mixtral", "bfloat16", None),
    ("gpt-oss", "float32", None),
    ("deepseek v3", "float32", None),
    ("mamba", "float32", None),
    ("zamba 2", "float32", None),
    ("qwen 3 next", "float32", None),
    pytest.param("llama, biases, tied", "float32", INT8, marks=NATIVE),
    pytest.param("mixtral", "float32", INT8, marks=NATIVE),
    pytest.param("llama, biases, tied", "float32", INT16, marks=NATIVE),
    pytest.param("mixtral", "float32", INT16, marks=NATIVE),
]


def reload_model(decoder, files, *, weights=None, progress, **how) -> None:
    """Put the numbers of other files of the same architecture in the place of a living decoder's."""
    with opened(
        decoder.spec, files, dtype=decoder.dtype, device=decoder.device, policy=weights, **how
    ) as reader:  # fmt: skip
        for name, stored in reader.read(progress):
            decoder.load_parameter(name, stored)


def prompt(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logits(decoder, vocab_size: int = VOCAB, model=None) -> list[torch.Tensor]:
    """Of a prompt and a token behind it."""
    paged = Paged(decoder, 1, 64)
    paged.model = decoder if model is None else model(paged)
    ids = [each % vocab_size for each in prompt(37)]
    return [paged.step({0: ids})[0], paged.step({0: ids[:1]})[0]]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize(("family", "dtype", "weights"), CASES)
def test_a_second_checkpoint_in_a_living_decoder_is_that_model(family, dtype, weights, tmp_path):
    first, second = (checkpoint(tmp_path / str(seed), FAMILIES[family].config(), seed) for seed in (1, 2))
    living = load_model(first, dtype=dtype, weights=weights, **OPTIONS)
    expected = logits(load_model(second, dtype=dtype, weights=weights, **OPTIONS))
    before = logits(living)
    assert not torch.equal(before[0], expected[0])
    reload_model(living, second, weights=weights, **OPTIONS)
    assert_same(logits(living), expected)
    reload_model(living, first, weights=weights, **OPTIONS)
    assert_same(logits(living), before)


@NATIVE
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt-oss"])
def test_so_is_one_whose_weights_stay_quantised(family, tmp_path):
    files = []
    for seed in (3, 4):
        gguf_models.make(family, tmp_path / f"{seed}.gguf", seed)
        files.append(resolve(str(tmp_path / f"{seed}.gguf"), None, lambda progress: None))
    living, other = (load_model(each, dtype="float32", weights=STORED, **OPTIONS) for each in files)
    reload_model(living, files[1], weights=STORED, **OPTIONS)
    assert living.weights_bytes == other.weights_bytes
    assert_same(logits(living, 50), logits(other, 50))


@pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
@pytest.mark.parametrize("family", ["llama, biases, tied", "gemma", "starcoder2", "mixtral"])
def test_what_was_traced_of_a_decoder_changes_with_it(family, tmp_path):
    first, second = (checkpoint(tmp_path / str(seed), FAMILIES[family].config(), seed) for seed in (1, 2))
    living = load_model(first, dtype="float32", **OPTIONS)
    expected = logits(load_model(second, dtype="float32", **OPTIONS))
    paged = Paged(living, 2, 64)
    paged.model = living.traced(paged.kv_caches)
    paged.step({0: prompt(9)})
    reload_model(living, second, **OPTIONS)
    got = [paged.step({1: prompt(37)})[1], paged.step({1: prompt(37)[:1]})[1]]
    assert_same(got, expected)


def test_plain_tensors_stay_where_they_are(tmp_path):
    """A captured graph holds their addresses; weights of references, as those of CUDA kernels, are such tensors."""
    ops.force("reference")
    try:
        files = checkpoint(tmp_path, FAMILIES["mixtral"].config(), 1)
        decoder = load_model(files, dtype="float32", **OPTIONS)
        (qkv,) = (each for name, each in decoder._parameters._linears.items() if ".0.self_attn.qkv_proj" in name)
        before = qkv._weight.data_ptr()
        stored = ops.StoredWeight.dense(torch.full(tuple(qkv._weight.shape), 0.5))
        decoder.load_parameter("model.layers.0.self_attn.qkv_proj.weight", stored)
        assert qkv._weight.data_ptr() == before
        assert (qkv._weight == 0.5).all()
    finally:
        ops.force(None)


@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=NATIVE)])
def test_what_does_not_fit_is_refused_by_name(kernels, tmp_path):
    ops.force(kernels)
    try:
        decoder = load_model(checkpoint(tmp_path, FAMILIES["mixtral"].config(), 1), dtype="float32", **OPTIONS)
        before = logits(decoder)
        dense = ops.StoredWeight.dense
        for name, stored, says in (
            ("model.layers.7.mlp.gate.weight", dense(torch.ones(1)), r"no parameter model\.layers\.7\.mlp"),
            ("model.norm.weight", dense(torch.ones(3)), r"model\.norm\.weight: its shape is \[3\] instead of \[64\]"),
            ("model.norm.weight", dense(torch.ones(64).half()), r"only plain numbers in float32"),
            (
                "model.layers.0.self_attn.o_proj.weight",
                dense(torch.ones(3, 4)),
                r"o_proj\.weight: weight has shape \[3, 4\]",
            ),
            ("model.layers.0.mlp.experts.1.down.weight", dense(torch.ones(3, 4)), r"weight has shape \[3, 4\]"),
        ):
            with pytest.raises(WeightsError, match=says):
                decoder.load_parameter(name, stored)
        assert_same(logits(decoder), before)
    finally:
        ops.force(None)


def test_a_bias_may_come_by_itself_where_weights_are_not_packed(tmp_path):
    ops.force("reference")
    try:
        files = checkpoint(tmp_path, FAMILIES["llama, biases, tied"].config(), 1)
        decoder = load_model(files, dtype="float32", **OPTIONS)
        before = logits(decoder)
        name = "model.layers.0.self_attn.o_proj.bias"
        decoder.load_parameter(name, ops.StoredWeight.dense(torch.ones(decoder.spec.hidden_size)))
        assert not torch.equal(logits(decoder)[0], before[0])
        reload_model(decoder, files, **OPTIONS)
        assert_same(logits(decoder), before)
    finally:
        ops.force(None)
