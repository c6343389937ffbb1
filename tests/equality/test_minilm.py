"""The built-in all-MiniLM-L6-v2: embeddings equal transformers' hidden states, averaged and normalised, in any batch."""

from __future__ import annotations

import random

import torch
import transformers
from torch.nn.functional import normalize

from runtime.api import PoolingParams
from runtime.config import EngineConfig
from runtime.models import implementation
from runtime.weights.fetch import resolve
from tests.equality.pooled import pooled


async def test_the_built_in_embedder_gives_what_its_authors_made():
    files = resolve("all-minilm-l6-v2", None, lambda progress: None)
    assert files.modules is not None
    assert files.modules.max_seq_length == 256
    spec = implementation.describe(files.config, "native", files.modules)
    assert (spec.pooler_info.pooling, spec.pooler_info.normalize, spec.pooler_info.embedding_size) == (
        "mean",
        True,
        384,
    )
    model = implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device="cpu",
        max_model_len=512, weights=implementation.WeightPolicy("float32"),
    )  # fmt: skip
    theirs = transformers.AutoModel.from_pretrained(files.path).eval()
    generator = random.Random(2)
    lengths = [1, 2, 512, 511, *(generator.randrange(1, 200) for _ in range(36))]
    texts = [([101, *(generator.randrange(1000, 30000) for _ in range(length))][:length], None) for length in lengths]
    config = EngineConfig(max_model_len=512)
    for order in (texts, generator.sample(texts, len(texts))):
        (found,) = await pooled(model, order, [PoolingParams()], config)
        for vector, (ids, _) in zip(found, order, strict=True):
            with torch.inference_mode():
                states = theirs(input_ids=torch.tensor([ids])).last_hidden_state[0]
            assert float(vector @ normalize(states.mean(dim=0), dim=0)) >= 0.99999


async def test_fewer_bits_of_its_weights_point_where_all_of_them_do():
    files = resolve("all-minilm-l6-v2", None, lambda progress: None)
    spec = implementation.describe(files.config, "native", files.modules)
    generator = random.Random(3)
    texts = [
        ([101, *(generator.randrange(1000, 30000) for _ in range(length)), 102], None)
        for length in (1, 5, 14, 14, 60, 120, 254)
    ]
    found = []
    for online in (None, "int8", "int16"):
        model = implementation.load(
            spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device="cpu",
            max_model_len=256, weights=implementation.WeightPolicy("float32", online=online),
        )  # fmt: skip
        (vectors,) = await pooled(model, texts, [PoolingParams()], EngineConfig(max_model_len=256))
        found.append(vectors)
    for exact, eight, sixteen in zip(*found, strict=True):
        assert 0.998 <= float(exact @ eight) < 0.999999
        assert float(exact.double() @ sixteen.double()) >= 0.999999
