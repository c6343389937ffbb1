"""A traced decoder: the same bits as layer by layer, of whatever family; what cannot be traced runs between."""

from __future__ import annotations

import pytest
import torch
import transformers

import ops
from ops import native
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from tests.equality.test_families import FAMILIES, VOCAB
from tests.runtime.models.paged import Paged

DENSE = {"head_dim": 16, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}


@pytest.fixture(autouse=True)
def _native():
    if native.missing is not None:
        pytest.skip(native.missing)


def made_up(config, folder, dtype="float32"):
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    return load_model(files, dtype=dtype, load_format="dummy", seed=0, progress=lambda progress: None)


def prompt(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def assert_same_bits(decoder) -> Paged:
    plain, traced = Paged(decoder, 2, 96), Paged(decoder, 2, 96)
    traced.model = decoder.traced(traced.kv_caches)
    for spans in ({0: prompt(41)}, {1: prompt(70), 0: prompt(1)}, {0: prompt(1), 1: prompt(1)}, {0: prompt(3)}):
        expected, got = plain.step(spans), traced.step(spans)
        assert all(torch.equal(got[row], expected[row]) for row in spans)
    return traced


@pytest.mark.parametrize("family", [name for name in FAMILIES if "through transformers" not in name])
def test_traced_layers_give_the_same_bits(family, tmp_path):
    assert_same_bits(made_up(FAMILIES[family].config(), tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**DENSE, intermediate_size=64, num_hidden_layers=3, attention_bias=True),
        transformers.Qwen3Config(**DENSE, intermediate_size=64, num_hidden_layers=3),
        transformers.Gemma2Config(**DENSE, intermediate_size=64, num_hidden_layers=3, sliding_window=30),
        transformers.CohereConfig(**DENSE, intermediate_size=64, num_hidden_layers=3),
        transformers.Olmo2Config(**DENSE, intermediate_size=64, num_hidden_layers=2),
        transformers.Starcoder2Config(**DENSE, intermediate_size=64, num_hidden_layers=3),
    ],
    ids=lambda config: config.model_type,
)
def test_dense_families_give_the_same_bits(config, tmp_path):
    assert_same_bits(made_up(config, tmp_path))


def test_a_dense_model_is_one_compiled_stack(tmp_path, monkeypatch):
    config = transformers.LlamaConfig(**DENSE, intermediate_size=64, num_hidden_layers=4)
    paged = assert_same_bits(made_up(config, tmp_path))
    runs = []
    run = ops.CompiledStack.run
    monkeypatch.setattr(ops.CompiledStack, "run", lambda *args: runs.append(1) or run(*args))
    paged.step({0: [5]})
    assert len(runs) == 1


def test_layers_that_cannot_be_traced_run_between_those_that_can(tmp_path, monkeypatch):
    config = transformers.Qwen3MoeConfig(
        **DENSE, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=5, num_experts=4,
        num_experts_per_tok=2, mlp_only_layers=[0, 1, 3], decoder_sparse_step=1,
    )  # fmt: skip
    paged = assert_same_bits(made_up(config, tmp_path))
    runs = []
    run = ops.CompiledStack.run
    monkeypatch.setattr(ops.CompiledStack, "run", lambda *args: runs.append(1) or run(*args))
    paged.step({0: [5]})
    assert len(runs) == 2  # layers 0 and 1, and layer 3
