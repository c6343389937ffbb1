"""LlamaIndex's embeddings by OpenAI's API, as its indexes call them: texts, queries, and batches of them."""

from __future__ import annotations

import pytest
from llama_index.embeddings.openai import OpenAIEmbedding

MODEL = "all-minilm-l6-v2"
TEXTS = ["The Colosseum stands in Rome.", "Where does the Colosseum stand?"]


def test_texts_queries_and_batches(embedder):
    vectors = OpenAIEmbedding(api_base=embedder.base + "/v1", api_key="none", model_name=MODEL, embed_batch_size=1)
    text, query = vectors.get_text_embedding(TEXTS[0]), vectors.get_query_embedding(TEXTS[1])
    assert len(text) == 384
    for one, other in zip(vectors.get_text_embedding_batch(TEXTS), (text, query), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


async def test_on_its_own_loop(embedder):
    vectors = OpenAIEmbedding(api_base=embedder.base + "/v1", api_key="none", model_name=MODEL)
    assert await vectors.aget_text_embedding(TEXTS[0]) == pytest.approx(vectors.get_text_embedding(TEXTS[0]), abs=1e-5)
