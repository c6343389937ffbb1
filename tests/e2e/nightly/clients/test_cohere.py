"""Cohere's client, the newer and the older: embeddings of its types, and ranks."""

from __future__ import annotations

import math

import cohere
import pytest

MODEL = "all-minilm-l6-v2"
TEXTS = ["Paris is the capital of France.", "A cat sleeps on the sofa."]


def test_embeddings_of_several_types(embedder):
    client = cohere.ClientV2(api_key="none", base_url=embedder.base)
    kinds = ["float", "int8", "ubinary"]
    found = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=kinds).embeddings
    assert found.float_ is not None
    assert found.int8 is not None
    assert found.ubinary is not None
    assert [len(found.float_[0]), len(found.int8[0]), len(found.ubinary[0])] == [384, 384, 48]
    length = math.hypot(*found.float_[0])
    assert found.int8[0] == pytest.approx([127 * number / length for number in found.float_[0]], abs=0.51)


def test_the_older_client_gets_a_list(embedder):
    client = cohere.Client(api_key="none", base_url=embedder.base)
    found = client.embed(model=MODEL, texts=TEXTS, input_type="search_document").embeddings
    assert [len(each) for each in found] == [384, 384]


def test_ranks(embedder):
    client = cohere.ClientV2(api_key="none", base_url=embedder.base)
    (best,) = client.rerank(model=MODEL, query="capital of France", documents=TEXTS, top_n=1).results
    assert best.index == 0
    assert best.relevance_score > 0.5


def test_a_refusal_is_its_own_error(embedder):
    client = cohere.ClientV2(api_key="none", base_url=embedder.base)
    with pytest.raises(cohere.errors.NotFoundError):
        client.embed(model="other", texts=TEXTS, input_type="search_document")
