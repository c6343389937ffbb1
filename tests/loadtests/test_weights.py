"""A checkpoint that the load test writes is one that the server reads: names, shapes, shards, numbers."""

from __future__ import annotations

import pytest
import torch

from loadtests.weights import cut, num_bytes, tensors_of, write_checkpoint
from runtime.models.load import load_model
from runtime.weights.fetch import resolve

CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_is_a_llama_in_shards(tmp_path, tied):
    config = CONFIG | {"tie_word_embeddings": tied}
    written = write_checkpoint(config, tmp_path / "model", shard_bytes=20_000)
    assert written == num_bytes(tensors_of(config))
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    model = load_model(
        resolve(str(tmp_path / "model"), None, lambda progress: None),
        dtype="float32", load_format="auto", seed=0, progress=lambda progress: None,
    )  # fmt: skip
    assert 2 * model.num_parameters == written
    positions = torch.arange(4)
    embedded = model._vocabulary.embed(positions)
    assert 0.01 < float(embedded.std()) < 0.03


def test_layers_are_left_out_until_it_fits():
    most = num_bytes(tensors_of(CONFIG)) - 1
    assert cut(CONFIG, most)["num_hidden_layers"] == 2
    assert cut(CONFIG, most + 1) == CONFIG
    with pytest.raises(ValueError, match="not one layer"):
        cut(CONFIG, 1000)
