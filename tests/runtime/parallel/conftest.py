"""A model of two layers in files, which engines of several devices start from."""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime.weights.fetch import resolve

SIZES = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def quiet(progress) -> None:
    pass


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(path)
    return resolve(str(path), None, quiet)
