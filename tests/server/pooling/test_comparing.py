"""Scores and ranks: by a cross-encoder's head, by cosine, by MaxSim; and the fields that two sides may have."""

from __future__ import annotations

import dataclasses
import math
import random

import msgspec
import pytest

from server.api.pooling.api_types import Ranking, Scores
from server.api.pooling.compare import cosine, max_sim
from server.api.pooling.encode import InputEncoder
from server.api.pooling.run import LANES, PooledInput, _Run
from tests.server.pooling.embedders import (
    CLASSIFIER,
    CLS,
    EMBEDDER,
    RERANKER,
    SEP,
    bytes_of,
    framing_tokenizer,
    means_of,
)
from tests.server.test_refusals import error_of

LATE = '{"task": "token_embed"}'
CLOSE = 1e-6


def vector(*rows: list[float]) -> memoryview:
    from array import array

    flat = memoryview(array("f", [number for row in rows for number in row]))
    return flat if len(rows) == 1 else flat.cast("B").cast("f", (len(rows), len(rows[0])))


def cosine_of(a: str, b: str) -> float:
    one, other = means_of(bytes_of(a), 8), means_of(bytes_of(b), 8)
    return sum(x * y for x, y in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


async def scores(server, **body) -> list[float]:
    answer = await server.post("/score", body)
    assert answer.status_code == 200, answer.text
    assert msgspec.to_builtins(msgspec.convert(answer.json(), Scores)) == answer.json()
    return [item["score"] for item in answer.json()["data"]]


async def ranks(server, path="/rerank", **body) -> dict:
    answer = await server.post(path, {"query": "q", "documents": ["a", "b"], **body})
    assert answer.status_code == 200, answer.text
    assert msgspec.to_builtins(msgspec.convert(answer.json(), Ranking)) == answer.json()
    return answer.json()


# --- numbers ------------------------------------------------------------------------------------------------------


def test_cosine_is_that_of_the_directions_whatever_the_lengths():
    assert cosine(vector([3.0, 4.0]), vector([6.0, 8.0])) == pytest.approx(1, abs=CLOSE)
    assert cosine(vector([1.0, 0.0]), vector([0.0, 2.0])) == 0
    for seed in range(200):  # rounding makes some of these more than 1
        some = vector([random.Random(seed).gauss(0, 1) for _ in range(9)])
        assert cosine(some, some) <= 1
        assert cosine(some, vector([-each for each in some.tolist()])) >= -1
    assert cosine(vector([0.0, 0.0]), vector([1.0, 2.0])) == 0


def test_max_sim_sums_over_the_first_texts_tokens_what_is_nearest_in_the_second():
    query, document = vector([1.0, 0.0], [0.0, 1.0]), vector([0.5, 0.0], [0.25, 0.75], [0.0, -1.0])
    assert max_sim(query, document) == 0.5 + 0.75


# --- /score -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
async def test_two_sides_have_either_of_four_pairs_of_names(serve, names):
    server = await serve(pooler=EMBEDDER)
    wanted = [cosine_of("q", "a"), cosine_of("q", "bc")]
    assert await scores(server, **{names[0]: "q", names[1]: ["a", "bc"]}) == pytest.approx(wanted, abs=CLOSE)


async def test_one_to_one_and_as_many_of_each(serve):
    server = await serve(pooler=EMBEDDER)
    assert await scores(server, text_1="a", text_2="b") == pytest.approx([cosine_of("a", "b")], abs=CLOSE)
    wanted = [cosine_of("a", "c"), cosine_of("b", "d")]
    assert await scores(server, text_1=["a", "b"], text_2=["c", "d"]) == pytest.approx(wanted, abs=CLOSE)
    assert len(server.engine.submitted) == 2 + 4


async def test_a_query_for_many_documents_is_computed_once(serve):
    server = await serve(pooler=EMBEDDER)
    await scores(server, text_1="q", text_2=["a"] * 5)
    assert len(server.engine.submitted) == 1 + 5


async def test_a_cross_encoder_reads_pairs_with_their_types_and_its_head_says_the_score(serve):
    server = await serve(pooler=RERANKER, speaks=framing_tokenizer())
    found = await scores(server, text_1="q", text_2=["a", {"text": "bc"}])
    first, second = server.engine.submitted
    assert first.prompt_ids == [CLS, *bytes_of("q"), SEP, *bytes_of("a"), SEP]
    assert second.prompt_ids == [CLS, *bytes_of("q"), SEP, *bytes_of("bc"), SEP]
    assert second.params.token_type_ids == [0, 0, 0, 1, 1, 1]
    assert second.params.task == "classify"
    assert found == [1.0, 1.0]  # of one class alone, as the fake divides by the sum
    raw = await scores(server, text_1="q", text_2=["a"], use_activation=False)
    assert raw == pytest.approx(means_of(first.prompt_ids, 1), rel=CLOSE)


@pytest.mark.parametrize("cut", [{}, {"truncate_prompt_tokens": -1}, {"max_tokens_per_query": 100}])
async def test_a_long_query_for_many_documents_is_not_tokenised_for_each_and_kept_by_none(serve, monkeypatch, cut):
    """Else a body of two megabytes makes the server tokenise, and hold, gigabytes."""
    lengths, kept = noted_work(monkeypatch)
    server = await serve(pooler=RERANKER, speaks=framing_tokenizer(), max_model_len=800)
    assert len((await ranks(server, query="q " * 300, documents=["d"] * 50, **cut))["results"]) == 50
    assert sum(length > 1 for length in lengths) <= LANES < 50  # those that began together
    assert [each.prompt_ids for each in kept] == [()] * 50


def noted_work(monkeypatch) -> tuple[list[int], list[PooledInput]]:
    """The length of each text whose ids are made by themselves, and all that is kept."""
    lengths: list[int] = []
    kept: list[PooledInput] = []
    content, settle = InputEncoder._content, _Run._settle

    def noted(self, text, prefix):
        lengths.append(len(text.content))
        return content(self, text, prefix)

    def noted_result(self, number, request, output):
        settle(self, number, request, output)
        kept.append(self._found[number])

    monkeypatch.setattr(InputEncoder, "_content", noted)
    monkeypatch.setattr(_Run, "_settle", noted_result)
    return lengths, kept


async def test_a_model_without_token_types_gets_none(serve):
    server = await serve(pooler=dataclasses.replace(RERANKER, num_token_types=0), speaks=framing_tokenizer())
    await scores(server, text_1="q", text_2="a")
    assert server.engine.submitted[0].params.token_type_ids is None


async def test_late_interaction_compares_all_tokens(serve):
    server = await serve(pooler=EMBEDDER, pooler_config=LATE)
    (same,) = await scores(server, text_1="abc", text_2="abc")
    assert {each.params.task for each in server.engine.submitted} == {"token_embed"}
    assert same == pytest.approx(3, rel=CLOSE)  # each of three tokens finds itself


async def test_words_may_be_the_classes_of_a_model_that_generates(serve):
    config = '{"classifier_from_token": ["<|im_start|>", "<|eos|>"]}'
    server = await serve(pooler=EMBEDDER, generates=True, pooler_config=config)
    (found,) = await scores(server, text_1="q", text_2="a")
    (request,) = server.engine.submitted
    assert request.params.label_token_ids == (0, 2)
    no, yes = means_of(request.prompt_ids, 2)
    assert found == pytest.approx(yes / (no + yes), rel=CLOSE)


# --- cutting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "query", "document"),
    [(10, "qqq", "aaaa"), (8, "qq", "aaa"), (7, "qq", "aa"), (13, "qqq", "aaaaaaa"), (30, "qqq", "a" * 12)],
)
async def test_a_pair_is_cut_where_it_is_longest(serve, room, query, document):
    server = await serve(pooler=RERANKER, speaks=framing_tokenizer())
    await scores(server, text_1="qqq", text_2="a" * 12, truncate_prompt_tokens=room)
    assert server.engine.submitted[0].prompt_ids == [CLS, *bytes_of(query), SEP, *bytes_of(document), SEP]


@pytest.mark.parametrize("pooler", [RERANKER, EMBEDDER])
async def test_queries_and_documents_have_limits_of_their_own(serve, pooler):
    server = await serve(pooler=pooler, speaks=framing_tokenizer())
    await scores(server, queries="qqqq", documents=["aaaa", "b"], max_tokens_per_query=2, max_tokens_per_doc=3)
    written = [[id for id in each.prompt_ids if id not in (CLS, SEP)] for each in server.engine.submitted]
    if pooler is RERANKER:
        assert written == [bytes_of("qqaaa"), bytes_of("qqb")]
    else:
        assert written == [bytes_of("qq"), bytes_of("aaa"), bytes_of("b")]


async def test_a_pair_that_is_too_long_is_refused_by_its_document_and_cut_where_cohere_would(serve):
    server = await serve(pooler=RERANKER, speaks=framing_tokenizer(), max_model_len=10)
    body = {"query": "q", "documents": ["a", "b" * 20]}
    refused = error_of(await server.post("/v1/rerank", body), 400)
    assert (refused["param"], refused["code"]) == ("documents[1]", "context_length_exceeded")
    await ranks(server, "/v2/rerank", **body)
    assert len(server.engine.submitted[-1].prompt_ids) == 10


# --- /rerank ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_best_first_with_their_text_and_place(serve, path):
    server = await serve(pooler=EMBEDDER)
    documents = ["zz", "q", {"text": "a"}]
    texts = ["zz", "q", "a"]
    answer = await ranks(server, path, documents=documents)
    wanted = sorted(range(3), key=lambda index: -cosine_of("q", texts[index]))
    assert [each["index"] for each in answer["results"]] == wanted
    assert answer["results"][0]["relevance_score"] == pytest.approx(1, abs=CLOSE)
    assert [each["document"]["text"] for each in answer["results"]] == [texts[index] for index in wanted]
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] == 1 + 2 + 1 + 1
    assert answer["meta"]["api_version"] == {"version": "2"}


async def test_so_many_of_the_best_and_no_documents_where_nobody_wants_them(serve):
    server = await serve(pooler=EMBEDDER)
    (best,) = (await ranks(server, documents=["zz", "q"], top_n=1, return_documents=False))["results"]
    assert best["index"] == 1
    assert "document" not in best
    assert len((await ranks(server, top_n=0))["results"]) == 2


async def test_documents_of_equal_score_come_as_they_were_given(serve):
    server = await serve(pooler=EMBEDDER)
    answer = await ranks(server, documents=["a", "a", "q", "a"])
    assert [each["index"] for each in answer["results"]] == [2, 0, 1, 3]


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "documents": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": {"title": "b"}}, "text_2.title"),
        ("/score", {"text_1": "a", "text_2": [{}]}, "text_2[0].text"),
        ("/score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("/rerank", {"query": "q"}, "documents"),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "q", "documents": ["a"], "instruction": "Judge"}, "instruction"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_its_field(serve, path, body, param):
    server = await serve(pooler=EMBEDDER)
    assert error_of(await server.post(path, body), 400)["param"] == param


async def test_a_classifier_of_several_classes_scores_nothing(serve):
    server = await serve(pooler=CLASSIFIER)
    refused = error_of(await server.post("/score", {"text_1": "a", "text_2": "b"}), 400)
    assert refused["code"] == "task_not_supported"
