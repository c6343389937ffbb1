"""What may be asked of a model that pools, and what is made of what a request leaves open."""

from __future__ import annotations

import pytest

from runtime.api import PoolerInfo, PoolingParams, Request, SamplingParams
from tests.fake_runner import model_info

RERANKER = model_info(
    architecture="BertForSequenceClassification", generates=False,
    pooler=PoolerInfo(16, "cls", normalize=False, labels=("score",), activation="sigmoid", num_token_types=2),
)  # fmt: skip
CHAT = model_info(pooler=PoolerInfo(16))
TAGGER = model_info(generates=False, pooler=PoolerInfo(16, "cls", labels=("O", "PER"), labels_tokens=True))


@pytest.mark.parametrize(
    ("model", "asked", "resolved"),
    [
        (CHAT, PoolingParams(), PoolingParams("embed", "last", True)),
        (CHAT, PoolingParams(pooling="mean", use_activation=False), PoolingParams("embed", "mean", False)),
        (RERANKER, PoolingParams(), PoolingParams("embed", "cls", False)),
        (RERANKER, PoolingParams("classify"), PoolingParams("classify", "cls", True)),
        (
            CHAT,
            PoolingParams("classify", label_token_ids=(4, 2)),
            PoolingParams("classify", "last", True, None, (4, 2)),
        ),
        (TAGGER, PoolingParams("token_classify"), PoolingParams("token_classify", "cls", True)),
    ],
)
def test_what_a_request_leaves_open_is_as_the_models_files_say(model, asked, resolved):
    assert model.resolve(asked, 3) == resolved


def test_a_request_that_leaves_nothing_open_is_not_written_anew():
    asked = PoolingParams(pooling="mean", use_activation=False)
    assert CHAT.resolve(asked, 3) is asked


@pytest.mark.parametrize(
    ("model", "asked", "message"),
    [
        (CHAT, PoolingParams("classify"), "cannot classify; it can embed, token_embed"),
        (TAGGER, PoolingParams("classify"), "cannot classify; it can embed, token_embed, token_classify"),
        (RERANKER, PoolingParams("classify", label_token_ids=(1,)), "generates no tokens"),
        (CHAT, PoolingParams("embed", label_token_ids=(1,)), "for the task classify, not embed"),
        (CHAT, PoolingParams("classify", label_token_ids=(1000,)), "from 0 to 999"),
        (CHAT, PoolingParams("token_embed", "mean"), "to the task embed, not token_embed"),
        (CHAT, PoolingParams(dimensions=17), "from 1 to 16"),
        (CHAT, PoolingParams(dimensions=0), "from 1 to 16"),
        (RERANKER, PoolingParams("classify", dimensions=1), "from 1 to 16"),
        (RERANKER, PoolingParams(token_type_ids=[0, 1]), "2 token_type_ids for 3 tokens"),
        (RERANKER, PoolingParams(token_type_ids=[0, 1, 2]), "from 0 to 1"),
        (CHAT, PoolingParams(token_type_ids=[0, 0, 1]), "from 0 to 0"),
        (RERANKER, SamplingParams(max_tokens=1), "generates no tokens; it can embed, token_embed, classify"),
    ],
)
def test_what_a_model_cannot_do_is_refused_in_words(model, asked, message):
    with pytest.raises(ValueError, match=message):
        model.check(Request("a", [1, 2, 3], asked))
