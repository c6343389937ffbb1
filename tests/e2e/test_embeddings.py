"""The built-in model that embeds, over a socket: with OpenAI's client, alone and among many, near and far, and as Cohere has it."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence

MODEL = "all-minilm-l6-v2"
CAT, FELINE, FRANCE = "A cat sleeps on the sofa.", "The kitty naps upon the couch.", "Paris is the capital of France."
# Sums of some hundreds of float32 products differ in their order, by batch: some 384 * 2**-24 of the vector's length.
SAME = 1 - 3e-5


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


def test_what_means_the_same_is_near_and_what_does_not_is_far(embedder):
    with embedder.client() as client:
        found = client.embeddings.create(model=MODEL, input=[CAT, FELINE, FRANCE])  # the client asks for base64
    cat, feline, france = (each.embedding for each in found.data)
    assert len(cat) == 384
    assert cosine(cat, feline) > 0.5 > 0.2 > cosine(cat, france)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 20


def test_a_text_has_one_vector_alone_and_among_a_thousand_of_all_lengths(embedder):
    with embedder.client() as client:
        (alone,) = client.embeddings.create(model=MODEL, input=CAT, encoding_format="float").data
        lengths = [1 + number // 10 % 30 if number % 10 == 0 else 1 for number in range(998)]  # in sentences
        texts = [CAT, *(f"{FRANCE} " * length for length in lengths), CAT]
        many = client.embeddings.create(model=MODEL, input=texts).data
    assert [each.index for each in many] == list(range(1000))
    assert cosine(many[0].embedding, alone.embedding) > SAME
    assert cosine(many[-1].embedding, alone.embedding) > SAME


def test_the_models_own_limit_holds_and_cuts(embedder):
    _, models = embedder.get("/v1/models")
    (card,) = models["data"]
    assert card["tasks"][0] == "embed"
    long = "cat " * (card["max_model_len"] + 10)
    status, refused = embedder.post("/v1/embeddings", {"input": ["ok", long]})
    assert (status, refused["error"]["param"]) == (400, "input[1]")
    status, cut = embedder.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    assert (status, cut["usage"]["prompt_tokens"]) == (200, card["max_model_len"])


def test_documents_are_ranked_by_their_nearness(embedder):
    body = {"query": "Where does the cat lie?", "documents": [FRANCE, CAT, FELINE], "top_n": 2}
    status, answer = embedder.post("/v2/rerank", body)
    assert status == 200
    assert {each["index"] for each in answer["results"]} == {1, 2}
    status, scores = embedder.post("/v1/score", {"text_1": body["query"], "text_2": body["documents"]})
    best = max(each["score"] for each in scores["data"])
    assert math.isclose(best, answer["results"][0]["relevance_score"], abs_tol=1 - SAME)


def test_cohere_and_ollama_have_the_same_vectors(embedder):
    _, cohere = embedder.post(
        "/v2/embed", {"model": MODEL, "texts": [CAT], "input_type": "search_query", "embedding_types": ["base64"]}
    )
    numbers = struct.unpack("<384f", base64.b64decode(cohere["embeddings"]["base64"][0]))
    _, ollama = embedder.post("/api/embed", {"model": MODEL, "input": CAT})
    assert cosine(numbers, ollama["embeddings"][0]) > SAME
    assert math.isclose(math.hypot(*ollama["embeddings"][0]), 1, abs_tol=1e-5)


def test_it_answers_no_chats_and_is_healthy(embedder):
    status, refused = embedder.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert (status, refused["error"]["code"]) == (400, "task_not_supported")
    assert embedder.get("/health/generate")[0] == 200
