"""What a model is served for: the options, the model's own files, and what the other routes say then."""

from __future__ import annotations

import json
from functools import partial

import pytest

from runtime.api import PoolerInfo, PoolingParams
from server.config.server_config import ServerConfig
from server.models.pooling import PoolerConfig, Prompts, ServedPooling, served_runner
from server.models.prompt import ChatTemplate
from server.process.load import served_pooling
from tests.fakes import fake_model
from tests.server.conftest import MESSAGES
from tests.server.pooling.embedders import CLASSIFIER, EMBEDDER, RERANKER
from tests.server.test_refusals import error_of
from tests.server.tiny import tiny_tokenizer

NO_TEMPLATE = ChatTemplate(None)


def served(pooler: PoolerInfo, config: str | None = None, convert="auto", **facts) -> ServedPooling:
    model = fake_model(pooler=pooler, **facts)
    return ServedPooling.of(model, tiny_tokenizer(), PoolerConfig.read(config), convert, Prompts())


# --- which of the two ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "generates", "embeds", "runner"),
    [
        ("auto", True, False, "generate"),
        ("auto", True, True, "pooling"),
        ("auto", False, False, "pooling"),
        ("generate", True, True, "generate"),
        ("pooling", True, False, "pooling"),
    ],
)
def test_the_option_decides_or_else_the_model(asked, generates, embeds, runner):
    assert served_runner(asked, fake_model(generates=generates), embeds=embeds) == runner


def test_what_cannot_generate_is_not_served_to():
    with pytest.raises(ValueError, match="--runner generate: FakeForCausalLM generates no tokens"):
        served_runner("generate", fake_model(generates=False), embeds=False)


class Files:
    """Of a model in a folder."""

    gguf = None

    def __init__(self, folder, transformer=""):
        self.modules = True if (folder / "modules.json").exists() else None
        self.modules_path = folder if self.modules else None
        self.tokenizer_path = folder / transformer


@pytest.mark.parametrize("transformer", ["", "0_Transformer"])
def test_sentence_transformers_files_make_a_decoder_one_that_embeds(transformer, tmp_path):
    files = partial(Files, tmp_path, transformer)
    model, tokenizer = fake_model(pooler=EMBEDDER), tiny_tokenizer()
    assert served_pooling(ServerConfig(), files(), model, tokenizer, NO_TEMPLATE) is None
    (tmp_path / "modules.json").write_text("[]")
    config = {
        "prompts": {"query": "q: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "cosine",
    }
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    found = served_pooling(ServerConfig(), files(), model, tokenizer, NO_TEMPLATE)
    assert found is not None
    assert found.tasks == ("embed", "token_embed")
    assert found.prompts.text(None, "prompt_name") == "q: "
    (tmp_path / "config_sentence_transformers.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        served_pooling(ServerConfig(), files(), model, tokenizer, NO_TEMPLATE)


@pytest.mark.parametrize("options", [{"convert": "embed"}, {"pooler_config": "{}"}])
def test_how_to_pool_is_no_option_of_a_model_that_generates(tmp_path, options):
    with pytest.raises(ValueError, match="add --runner pooling"):
        served_pooling(ServerConfig(**options), Files(tmp_path), fake_model(), tiny_tokenizer(), NO_TEMPLATE)


# --- --pooler-config and --convert ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "[]", '{"pooling": "CLS"}', '{"pooling_type": "MAX"}', '{"dimensions": 0}'])
def test_a_pooler_config_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="--pooler-config: "):
        PoolerConfig.read(text)


def test_what_is_said_twice_is_refused():
    with pytest.raises(ValueError, match="set one"):
        PoolerConfig.read('{"pooling_type": "CLS", "seq_pooling_type": "CLS"}')


def test_it_changes_what_requests_leave_open():
    plain = served(EMBEDDER)
    assert plain.params("embed") == PoolingParams("embed")
    told = served(
        PoolerInfo(8, matryoshka_dimensions=()), '{"pooling_type": "CLS", "use_activation": false, "dimensions": 4}'
    )
    assert told.params("embed") == PoolingParams("embed", pooling="cls", use_activation=False, dimensions=4)
    assert told.params("embed", use_activation=True, dimensions=8).use_activation is True
    assert told.params("embed", dimensions=8).dimensions is None
    assert told.params("token_embed").pooling is None


def test_a_model_cannot_be_told_to_cut_what_it_was_not_trained_to():
    with pytest.raises(ValueError, match="--pooler-config: dimensions 4: this model does not support fewer"):
        served(EMBEDDER, '{"dimensions": 4}')


@pytest.mark.parametrize(
    ("pooler", "config", "convert", "tasks", "scoring"),
    [
        (EMBEDDER, None, "auto", ("embed", "token_embed"), "bi-encoder"),
        (EMBEDDER, '{"pooling_type": "ALL"}', "auto", ("token_embed", "embed"), "late-interaction"),
        (RERANKER, None, "auto", ("classify",), "cross-encoder"),
        (RERANKER, None, "embed", ("embed", "token_embed"), "bi-encoder"),
        (PoolerInfo(8, labels=("a", "b"), labels_tokens=True), None, "auto", ("token_classify",), None),
        (
            EMBEDDER,
            '{"classifier_from_token": ["<|im_start|>", "<|im_end|>"]}',
            "classify",
            ("classify",),
            "cross-encoder",
        ),
    ],
)
def test_the_head_decides_what_a_model_is_for_unless_it_is_converted(pooler, config, convert, tasks, scoring):
    found = served(pooler, config, convert)
    assert found.tasks == tasks
    if scoring is not None:
        assert found.scoring == scoring


@pytest.mark.parametrize(
    ("pooler", "config", "convert", "complaint"),
    [
        (EMBEDDER, None, "classify", "has no classification head"),
        (EMBEDDER, '{"task": "classify"}', "auto", "does not support the task classify"),
        (CLASSIFIER, '{"task": "embed"}', "auto", "does not support the task embed"),
        (EMBEDDER, '{"classifier_from_token": ["no such", "word"]}', "auto", "'no such' is not a token"),
    ],
)
def test_what_a_model_is_not_it_is_not_served_for(pooler, config, convert, complaint):
    with pytest.raises(ValueError, match=complaint):
        served(pooler, config, convert)


# --- what clients are told ------------------------------------------------------------------------------------------

POOLING = {
    "/v1/embeddings": {"input": "Hi"}, "/pooling": {"input": "Hi"}, "/classify": {"input": "Hi"}, "/v2/embed": {"texts": ["Hi"]},
    "/score": {"text_1": "a", "text_2": "b"}, "/rerank": {"query": "q", "documents": ["a"]},
}  # fmt: skip
GENERATION = {
    "/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"},
    "/completion": {"prompt": "Hi"},
}  # fmt: skip


@pytest.mark.parametrize("path", POOLING)
async def test_a_model_that_generates_says_how_it_could_be_pooled(serve, path):
    server = await serve()
    refused = error_of(await server.post(path, POOLING[path]), 400)
    assert (refused["code"], refused["param"]) == ("task_not_supported", "model")
    assert "--runner pooling" in refused["message"]
    assert (await server.http.get("/v1/models")).json()["data"][0]["tasks"] == ["generate"]


@pytest.mark.parametrize("path", GENERATION)
async def test_a_model_that_is_pooled_answers_no_chats(serve, path):
    server = await serve(pooler=EMBEDDER)
    refused = error_of(await server.post(path, GENERATION[path]), 400)
    assert (refused["code"], refused["param"]) == ("task_not_supported", "model")
    assert "embed" in refused["message"]
    assert (await server.http.get("/v1/models")).json()["data"][0]["tasks"] == ["embed", "token_embed"]
    assert not server.engine.submitted


async def test_another_models_name_is_a_404(serve):
    server = await serve(pooler=EMBEDDER)
    for path, body in POOLING.items():
        if path != "/classify":
            assert error_of(await server.post(path, {**body, "model": "other"}), 404)["param"] == "model"
