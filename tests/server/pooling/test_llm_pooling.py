"""LLM.embed, classify, encode, score and rerank: what /v1/embeddings and its kin answer, to a program."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from runtime.api import EngineStopped
from server import LLM, PoolingParams
from server.models.defaults import sampling_defaults
from server.models.pooling import PoolerConfig, Prompts, ServedPooling
from tests.fakes import FakeEngine, fake_model
from tests.server.pooling.embedders import (
    CLASSIFIER,
    CLS,
    EMBEDDER,
    MATRYOSHKA,
    RERANKER,
    SEP,
    bytes_of,
    framing_tokenizer,
    means_of,
    normalised,
)
from tests.server.tiny import chatml, loaded_model

CLOSE = 1e-6


@pytest.fixture
def serving(monkeypatch):
    """`serving(pooler)`: an LLM of that model, and its engine. None generates."""
    opened = []

    def make(pooler, **options):
        made = []

        async def load(config, report, cancel):
            tokenizer = framing_tokenizer()
            facts = {} if pooler is None else {"pooler": pooler, "generates": False}
            model = fake_model(vocab_size=tokenizer.vocab_size, max_model_len=64, **facts)
            made.append(FakeEngine(model=model))
            loaded = loaded_model(made[0], tokenizer, chatml(tokenizer), sampling_defaults(), ("tiny",))
            if pooler is None:
                return loaded
            asked = PoolerConfig.read(config.pooler_config)
            pooling = ServedPooling.of(model, tokenizer, asked, config.convert, Prompts())
            return dataclasses.replace(loaded, pooling=pooling)

        monkeypatch.setattr("server.llm.core.load", load)
        opened.append(LLM("tiny", **options))
        return opened[-1], made[0]

    yield make
    for llm in opened:
        llm.close()


def framed(text: str) -> list[int]:
    return [CLS, *bytes_of(text), SEP]


def test_vectors_come_in_the_prompts_order_with_their_ids(serving):
    llm, engine = serving(EMBEDDER)
    prompts = ["Hi", [5, 6], {"prompt": "Ho"}, {"prompt_token_ids": [7]}]
    found = llm.embed(prompts, use_tqdm=False)
    wanted = [framed("Hi"), [5, 6], framed("Ho"), [7]]
    assert [each.prompt_token_ids for each in found] == wanted
    for output, ids in zip(found, wanted, strict=True):
        assert output.outputs.embedding == pytest.approx(normalised(means_of(ids, 8)), abs=CLOSE)
        assert output.outputs.hidden_size == 8
        assert output.finished
    assert [each.request_id for each in found] == [each.id for each in engine.submitted]


def test_one_prompt_needs_no_list_and_none_gives_none(serving):
    llm, _ = serving(EMBEDDER)
    assert len(llm.embed("Hi", use_tqdm=False)) == 1
    assert llm.embed([], use_tqdm=False) == []


def test_more_prompts_than_a_request_may_have_are_an_llms_to_take(serving, monkeypatch):
    monkeypatch.setattr("server.api.pooling.request.MAX_INPUTS", 3)
    monkeypatch.setattr("server.api.pooling.run.MAX_NUMBERS", 3)
    llm, _ = serving(EMBEDDER)
    assert len(llm.embed(["a"] * 500, use_tqdm=False)) == 500


def test_params_are_those_of_the_route_one_for_all_or_one_for_each(serving):
    llm, engine = serving(MATRYOSHKA)
    short, raw = PoolingParams(dimensions=2), PoolingParams(use_activation=False, truncate_prompt_tokens=3)
    assert [each.outputs.hidden_size for each in llm.embed(["a", "b"], pooling_params=short, use_tqdm=False)] == [2, 2]
    found = llm.embed(["abc", "abc"], pooling_params=[short, raw], use_tqdm=False)
    assert [each.outputs.hidden_size for each in found] == [2, 8]
    assert engine.submitted[-1].prompt_ids == framed("a")
    assert engine.submitted[-1].params.use_activation is False


def test_classes_and_arrays(serving):
    llm, _ = serving(CLASSIFIER)
    (classes,) = llm.classify("Hi", use_tqdm=False)
    assert sum(classes.outputs.probs) == pytest.approx(1, abs=CLOSE)
    assert classes.outputs.num_classes == 3
    (pooled,) = llm.encode("Hi", use_tqdm=False)
    assert pooled.outputs.data.dtype == np.float32
    assert pooled.outputs.data.tolist() == classes.outputs.probs


def test_encode_gives_the_vectors_of_all_tokens(serving):
    llm, _ = serving(EMBEDDER)
    (pooled,) = llm.encode("Hi", pooling_task="token_embed", use_tqdm=False)
    assert pooled.outputs.data.shape == (4, 8)
    with pytest.raises(ValueError, match="contradicts 'embed'"):
        llm.embed("Hi", pooling_params=PoolingParams(task="token_embed"), use_tqdm=False)


def test_scores_and_ranks(serving):
    llm, _ = serving(EMBEDDER)
    one, other = llm.score("q", ["q", "zz"], use_tqdm=False)
    assert one.outputs.score == pytest.approx(1, abs=CLOSE)
    assert other.outputs.score < 0.999
    assert other.prompt_token_ids == [*framed("q"), *framed("zz")]
    assert len(llm.score(["a", "b"], ["c", "d"], use_tqdm=False)) == 2
    best, last = llm.rerank("q", ["zz", "q"], use_tqdm=False)
    assert (best.index, best.document) == (1, "q")
    assert best.relevance_score > last.relevance_score
    assert len(llm.rerank("q", ["zz", "q"], top_n=1, use_tqdm=False)) == 1


def test_a_cross_encoder_scores_pairs(serving):
    llm, engine = serving(RERANKER)
    (found,) = llm.score("q", "a", pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    ids = [CLS, *bytes_of("q"), SEP, *bytes_of("a"), SEP]
    assert found.prompt_token_ids == engine.submitted[0].prompt_ids == ids
    assert found.outputs.score == pytest.approx(means_of(ids, 1)[0], rel=CLOSE)


def test_what_is_wrong_is_a_value_error_that_names_it(serving):
    llm, _ = serving(EMBEDDER)
    for call, words in (
        (lambda: llm.embed(["a", "b" * 100], use_tqdm=False), r"prompts\[1\]"),
        (lambda: llm.embed([[5], []], use_tqdm=False), r"prompts\[1\] is empty"),
        (lambda: llm.classify("a", use_tqdm=False), "does not support the task classify"),
        (lambda: llm.embed("a", pooling_params=PoolingParams(dimensions=4), use_tqdm=False), "Matryoshka"),
        (lambda: llm.embed("a", pooling_params=[], use_tqdm=False), "0 for 1 prompts"),
        (lambda: llm.embed("a", pooling_params=PoolingParams(max_tokens_per_doc=4), use_tqdm=False), "does not use"),
        (lambda: llm.score(["a", "b"], "c", use_tqdm=False), "data_1 has 2 texts"),
        (
            lambda: llm.score("a", "b", pooling_params=PoolingParams(dimensions=4), use_tqdm=False),
            "score does not use",
        ),
        (lambda: PoolingParams(dimension=4), "did you mean dimensions"),
        (lambda: PoolingParams(dimensions=0), "dimensions"),
        (lambda: llm.generate("a", use_tqdm=False), "does not support the task generate"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_a_model_that_generates_says_how_it_could_be_pooled(serving):
    llm, _ = serving(None)
    for call in (llm.embed, llm.classify, llm.encode, lambda text: llm.score(text, text)):
        with pytest.raises(ValueError, match="--runner pooling"):
            call("Hi")


def test_the_engines_faults_are_runtime_errors(serving):
    llm, engine = serving(EMBEDDER)
    engine.refuse = EngineStopped("it has died")
    with pytest.raises(RuntimeError, match="it has died"):
        llm.embed("Hi", use_tqdm=False)
